"""OpenAI's completions, by the official client, over a started server."""

import openai
import pytest
from fake_engine import ANSWER, FakeEngine
from started import started

from meshwright.execution.text.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def server():
    with started(FakeEngine(byte_tokenizer())) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_text_follows_a_prompt(client):
    done = client.completions.create(model="fake/model", prompt="hello", max_tokens=40, temperature=0)
    assert done.choices[0].text == (ANSWER * 2).encode()[:40].decode()
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 40, 45)
    assert done.usage.prompt_tokens_details.cached_tokens == 2


def test_a_stream_has_the_same_text_in_pieces(client):
    options = {"model": "fake/model", "prompt": "hello", "max_tokens": 50, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    stream = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *pieces, usage = stream
    assert "".join(piece.choices[0].text for piece in pieces) == whole
    assert len(pieces) > 20
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage.completion_tokens == 50


def test_prompts_and_texts_are_numbered_in_order(client):
    done = client.completions.create(
        model="fake/model", prompt=[[104, 105], [106]], n=2, max_tokens=3, seed=7, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    texts = [choice.token_ids for choice in done.choices]
    answer = list(ANSWER.encode())
    assert texts == [answer[7:10], answer[8:11]] * 2
    assert [choice.prompt_token_ids for choice in done.choices] == [[104, 105]] * 2 + [[106]] * 2
    assert done.usage.prompt_tokens == 3


def test_echo_with_logprobs_is_as_evaluation_harnesses_read_it(client):
    done = client.completions.create(
        model="fake/model", prompt="abx", max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    choice = done.choices[0]
    assert choice.text == "abxG"
    assert choice.logprobs.tokens == ["a", "b", "x", "G"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs[:2] == [None, -0.25]
    # "b" is the likeliest after "a", "x" is not after "b".
    is_greedy = [
        logprob == max(top.values())
        for logprob, top in zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True)
    ]
    assert is_greedy == [True, False, False]


def test_a_scored_prompt_is_as_many_choices_as_were_asked_for(client):
    options = {"model": "fake/model", "prompt": ["abx", "ab"], "max_tokens": 0, "logprobs": 1, "echo": True}
    done, one = (client.completions.create(**options, n=n) for n in (3, 1))
    assert [choice.index for choice in done.choices] == [*range(6)]
    for number, choice in enumerate(done.choices):
        assert choice.logprobs == one.choices[number // 3].logprobs
        assert (choice.text, choice.finish_reason) == (["abx", "ab"][number // 3], "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 0)


def test_a_stop_text_ends_a_text_before_it(client):
    for stream in (False, True):
        done = client.completions.create(
            model="fake/model", prompt="a", max_tokens=60, temperature=0, stop=["! "], stream=stream
        )
        pieces = list(done) if stream else [done]
        assert "".join(piece.choices[0].text for piece in pieces) == "Grüße, world"
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_mistakes_are_the_clients_exceptions(server, client):
    with pytest.raises(openai.BadRequestError, match="did you mean temperature") as error:
        client.completions.create(model="fake/model", prompt="a", extra_body={"temprature": 1})
    assert error.value.body["param"] == "temprature"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'other' on this server; its model is 'fake/model'"
    ):
        client.completions.create(model="other", prompt="a")
    server.engine.queue = 0
    try:
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="fake/model", prompt="a")
    finally:
        server.engine.queue = 64
    assert error.value.response.headers["retry-after"] == "1"


def test_vllms_fields_of_prompts_and_texts(server, client):
    options = {"model": "fake/model", "max_tokens": 8, "temperature": 0}
    for field, value, prompt in (("truncate_prompt_tokens", 3, b"cde"), ("truncate_prompt_tokens", -1, b"abcde")):
        client.completions.create(**options, prompt="abcde", extra_body={field: value})
        assert bytes(server.engine.requests[-1].prompt) == prompt
    # Of a long text no more is tokenized than the context can have tokens of.
    client.completions.create(**options, prompt="ab" * 200_000 + "c", extra_body={"truncate_prompt_tokens": 3})
    assert bytes(server.engine.requests[-1].prompt) == b"abc"
    whole = client.completions.create(**options, prompt="a", stop="w").choices[0].text
    body = {"include_stop_str_in_output": True}
    assert client.completions.create(**options, prompt="a", stop="ü", extra_body=body).choices[0].text.endswith("ü")
    pieces = client.completions.create(**options, prompt="a", stop="ü", extra_body=body, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces).endswith("ü")
    assert "ü" in whole
    client.completions.create(**options, prompt="a", extra_body={"skip_special_tokens": False})
    assert not server.engine.requests[-1].skip_special_tokens
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens is 0; a prompt has at least one token"):
        client.completions.create(**options, prompt="a", extra_body={"truncate_prompt_tokens": 0})
