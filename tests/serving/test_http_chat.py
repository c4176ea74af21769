"""OpenAI's chats, models and embeddings, by the official client, over a started server."""

import base64
import math
import struct

import openai
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import ANSWER, FakeEngine
from started import started

MODEL = "fake/model"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with started(FakeEngine(chat_tokenizer())) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(server):
    return bytes(server.engine.requests[-1].prompt).decode()


def test_a_message_follows_a_chat(server, client):
    done = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "be short"}, *HELLO],
        max_completion_tokens=7,
        temperature=0,
    )
    assert prompt_of(server) == "system: be short\nuser: hello\nassistant:"
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße", "length")
    assert done.usage.total_tokens == 7 + len(prompt_of(server))


def test_the_context_is_the_limit_where_none_is_given(server, client):
    done = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert done.usage.total_tokens == 512
    with pytest.raises(
        openai.BadRequestError,
        match=r"messages has .* tokens; the context .* is 512 tokens, prompt and completion together",
    ) as error:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 600}])
    assert error.value.code == "context_length_exceeded"


def test_a_stream_has_the_role_first_and_the_same_text(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=48, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    first, *pieces, last, usage = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(piece.choices[0].delta.role is None for piece in pieces)
    text = "".join(piece.choices[0].delta.content or "" for piece in [*pieces, last])
    assert text == (ANSWER * 2).encode()[:48].decode()
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 48


def test_the_clients_own_stream_helper_collects_the_message(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stop="!", temperature=0) as stream:
        for _ in stream:
            pass
        done = stream.get_final_completion()
    assert done.choices[0].message.content == ANSWER.partition("!")[0]


def test_several_messages_and_their_seeds(client):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "n": 3, "seed": 23}
    done = client.chat.completions.create(**options)
    answer = ANSWER.encode()
    assert [choice.message.content.encode() for choice in done.choices] == [answer[23 + n : 25 + n] for n in range(3)]
    texts = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert [texts[n] for n in range(3)] == [choice.message.content for choice in done.choices]


def test_logprobs_have_the_likeliest_tokens(client):
    done = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = done.choices[0].logprobs.content
    assert [token.token for token in content] == ["G", "r", "\ufffd", "\ufffd"]
    assert content[0].bytes == [71]
    assert content[2].bytes is None
    for token in content:
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    # ";" follows ":", by the table.
    assert (content[0].top_logprobs[0].token, content[0].top_logprobs[0].logprob) == (";", -0.25)
    none = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, logprobs=True)
    assert none.choices[0].logprobs.content[0].top_logprobs == []
    with pytest.raises(openai.BadRequestError, match="set logprobs to true"):
        client.chat.completions.create(model=MODEL, messages=HELLO, top_logprobs=1)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}


def test_tools_and_calls_pass_through_the_template(server, client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is"}, {"type": "text", "text": "Bonn?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=1)
    chat = "user: How is\nBonn?\nassistant: <weather Bonn>\n(c1)tool: rain\nassistant:"
    assert prompt_of(server) == f"[weather]{chat}"
    client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=1)
    assert prompt_of(server) == chat
    options = {"chat_template_kwargs": {"enable_thinking": False, "messages": []}}  # The template's own names stay.
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=options)
    assert prompt_of(server) == f"{chat} at once:"
    with pytest.raises(openai.BadRequestError, match=r"tool_choice forces .* has no format for calls"):
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="required")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "kind", "source"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        ),
        ({"extra_body": {"guided_regex": "[ab]+"}}, "regex", "[ab]+"),
        ({"extra_body": {"guided_json": "{}"}}, "json_schema", "{}"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", 'no "x"']}}}, "lark", 'start: "yes" | "no \\"x\\""'),
    ],
)
def test_the_form_of_a_text_reaches_the_engine(server, client, options, kind, source):
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, **options)
    constraint = server.engine.requests[-1].constraint
    assert (constraint and constraint.kind, constraint and constraint.source) == (kind, source)


def test_every_option_reaches_the_engine(server, client):
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, temperature=0.5, top_p=0.9, seed=-1, stop=["x", "yz"],
        logit_bias={"65": -100, "66": 2}, presence_penalty=0.5, frequency_penalty=-1,
        extra_body={
            "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [7],
        },
    )  # fmt: skip
    request = server.engine.requests[-1]
    assert (request.max_tokens, request.stop, request.stop_tokens, request.min_tokens) == (5, ("x", "yz"), (7, 0), 2)
    assert request.logit_bias == ((65, -100), (66, 2))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.5, 2**31 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, extra_body={"ignore_eos": True})
    assert server.engine.requests[-1].stop_tokens == ()


def test_two_forms_of_one_text_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="response_format and guided_regex both constrain the output"):
        client.chat.completions.create(
            model=MODEL, messages=HELLO, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"}
        )


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([], "messages is an empty list; it must be a list of"),
        ([{"role": "robot", "content": "x"}], r'messages\[0\].role is "robot"; it should be \'system\''),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5; it should be a valid string"),
        ([{"role": "user", "contents": "x"}], r"messages\[0\].contents is not a field of this request"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\].image_url is not a field",
        ),
    ],
)
def test_messages_that_are_none_are_refused(client, messages, wanted):
    with pytest.raises(openai.BadRequestError, match=wanted):
        client.chat.completions.create(model=MODEL, messages=messages)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_embeddings_are_the_same_in_both_encodings(server, client):
    texts = ["abc", "xy"]
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [entry.index for entry in plain.data] == [0, 1]
    assert plain.data[0].embedding == [math.sin(sum(b"abc") + n) for n in range(8)]
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (5, 5)
    # The client asks for base64 by itself, and turns it into numbers.
    coded = client.embeddings.create(model=MODEL, input=texts)
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="abc", encoding_format="base64").http_response
    (entry,) = raw.json()["data"]
    assert struct.unpack("<8f", base64.b64decode(entry["embedding"])) == pytest.approx(
        plain.data[0].embedding, abs=1e-6
    )
    for one, other in zip(plain.data, coded.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert server.engine.requests[-1].max_tokens == 0
    short = client.embeddings.create(model=MODEL, input="abc", dimensions=3).data[0].embedding
    whole = client.embeddings.create(model=MODEL, input="abc").data[0].embedding
    assert short == whole[:3]
    with pytest.raises(openai.BadRequestError, match="dimensions is 9; the embeddings of fake/model have 8 numbers"):
        client.embeddings.create(model=MODEL, input="abc", dimensions=9)


def test_many_prompts_go_through_a_short_queue(server, client):
    server.engine.queue = 3
    try:
        many = client.embeddings.create(model=MODEL, input=[f"text {n}" for n in range(40)], encoding_format="float")
    finally:
        server.engine.queue = 64
    assert [entry.embedding[0] for entry in many.data] == [math.sin(sum(f"text {n}".encode())) for n in range(40)]
