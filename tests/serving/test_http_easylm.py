"""The endpoints of EasyLM's and LWM's servers, over a started server."""

import itertools

import httpx
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import ANSWER, FakeEngine, token_logprob
from started import started

from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.serving.http.easylm.loglikelihood import windows

CONTEXT = 32


@pytest.fixture(scope="module")
def server():
    with started(FakeEngine(chat_tokenizer()), context=CONTEXT) as found:
        yield found


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.url) as client:
        yield lambda path, **data: client.post(path, json=data)


def log_likelihood(tokens, num_scored):
    """By the table of the fake engine."""
    pairs = list(itertools.pairwise(tokens))[-num_scored:]
    return sum(token_logprob(before, token, 0).logprob for before, token in pairs)


def test_texts_follow_prefixes(post):
    done = post("/generate", prefix_text=["ab", "c"], temperature=0).json()
    answer = ANSWER.encode()
    # What the context leaves; the last character of the second is cut.
    wanted = [answer[: CONTEXT - 2].decode(errors="replace"), answer[: CONTEXT - 1].decode(errors="replace")]
    assert done == {"prefix_text": ["ab", "c"], "output_text": wanted, "temperature": 0}
    assert post("/generate", prefix_text=["ab"], max_tokens=1).json()["temperature"] == 1


def test_each_prefix_has_a_stop_of_its_own(post):
    done = post("/greedy-until", prefix_text=["ab", "c", "d"], until=["ü", ["w", ","], "e, "]).json()
    assert done["output_text"] == ["Gr", "Grüße", "Grüß"]
    assert done["until"] == ["ü", ["w", ","], "e, "]
    assert post("/greedy-until", prefix_text=["ab"], until=["xx"], max_length=2).json()["output_text"] == ["Gr"]
    refused = post("/greedy-until", prefix_text=["a", "b"], until=["x"])
    assert refused.status_code == 400
    assert "until has 1 items and prefix_text has 2" in refused.text


def test_loglikelihoods_are_of_the_texts_alone(post):
    done = post("/loglikelihood", prefix_text=["ab", "x", ""], text=["cd", "cd", "b"]).json()
    wanted = [log_likelihood(b"abcd", 2), log_likelihood(b"xcd", 2), log_likelihood(b"\0b", 1)]
    assert done["log_likelihood"] == pytest.approx(wanted)
    # "c" is the likeliest after "b", and "d" after "c".
    assert done["is_greedy"] == [True, False, False]
    assert post("/loglikelihood", text=["b"]).json()["log_likelihood"] == pytest.approx([wanted[2]])
    assert post("/loglikelihood", text=[""]).json()["log_likelihood"] == [0]


def test_of_a_prefix_that_is_too_long_the_beginning_is_left_out(server, post):
    done = post("/loglikelihood", prefix_text=["y" * 100], text=["zz"]).json()
    assert done["log_likelihood"] == pytest.approx([log_likelihood(b"yzz", 2)])
    assert bytes(server.engine.requests[-1].prompt) == b"y" * (CONTEXT - 2) + b"zz"
    refused = post("/loglikelihood", text=["z" * CONTEXT])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "/loglikelihood-rolling" in refused.text


def test_a_long_text_is_scored_in_windows(server, post):
    text = "".join(chr(33 + n % 90) for n in range(100))
    before = len(server.engine.requests)
    done = post("/loglikelihood-rolling", text=[text, "", "a"]).json()
    whole = log_likelihood(b"\0" + text.encode(), 100)
    assert done["log_likelihood"] == pytest.approx([whole, 0, log_likelihood(b"\0a", 1)])
    assert done["is_greedy"] == [False, True, False]
    # 100 tokens after the first, 31 a window.
    assert sorted(len(request.prompt) for request in server.engine.requests[before:]) == [2, 32, 32, 32, 32]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 15, 16, 50])
def test_windows_score_each_token_once(length):
    tokens = list(range(length))
    scored = [token for window in windows(tokens, 8) for token in window.tokens[-window.num_scored :]]
    assert scored == tokens[1:]
    assert all(len(window.tokens) <= 8 and window.num_scored < len(window.tokens) for window in windows(tokens, 8))


def test_a_chat_goes_on_by_its_context(server, post):
    first = post("/chat", prompt="hi", temperature=0, max_tokens=2).json()
    assert first["response"] == "Gr"
    assert bytes(server.engine.requests[-1].prompt) == b"user: hi\nassistant:"
    server.service.context = 512
    second = post("/chat", prompt="and?", context=first["context"], temperature=0, max_tokens=2).json()
    assert bytes(server.engine.requests[-1].prompt) == b"user: hi\nassistant: Gr\nuser: and?\nassistant:"
    assert second["context"] != first["context"]
    # Any other text is what the chat is about.
    post("/chat", prompt="who?", context="Once. ", temperature=0, max_tokens=2)
    server.service.context = CONTEXT
    assert bytes(server.engine.requests[-1].prompt) == b"user: Once. who?\nassistant:"


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_a_chat_that_is_too_long_loses_its_oldest_turns(server, post, max_tokens):
    """Half of the context is the prompt's where nobody says how long the answer is."""
    server.service.context = 80
    context, limits = "", {} if max_tokens is None else {"max_tokens": max_tokens}
    for number in range(6):
        done = post("/chat", prompt=f"turn {number}", context=context, temperature=0, **limits)
        assert done.status_code == 200, done.text
        context = done.json()["context"]
    prompt = bytes(server.engine.requests[-1].prompt).decode()
    assert len(prompt) <= (40 if max_tokens is None else 76)
    assert prompt.startswith("user: turn ")
    assert prompt.endswith("user: turn 5\nassistant:")
    assert "turn 0" not in prompt
    # A message that is too long alone keeps its end; no turn is forgotten.
    post("/chat", prompt="x" * 100, context=context, temperature=0, **limits).raise_for_status()
    assert bytes(server.engine.requests[-1].prompt).decode().endswith("xx\nassistant:")
    assert "turn 0" in context
    server.service.context = CONTEXT


def test_a_model_without_a_template_goes_on_with_the_text():
    with started(FakeEngine(byte_tokenizer())) as server, httpx.Client(base_url=server.url) as client:
        done = client.post(
            "/chat", json={"prompt": "hi", "context": "Once. ", "temperature": 0, "max_tokens": 2}
        ).json()
        assert done == {"response": "Gr", "context": "Once. hiGr", "temperature": 0}
        # Without a token that begins a text its first one is predicted by nothing.
        scored = client.post("/loglikelihood-rolling", json={"text": ["abc"]}).json()
        assert scored["log_likelihood"] == pytest.approx([log_likelihood(b"abc", 2)])
        refused = client.post("/loglikelihood", json={"text": ["abc"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prefix_text")
