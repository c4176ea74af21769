"""What a server does with requests that ask for too much, and with clients that speak HTTP otherwise."""

import json
import re
import socket
import time

import httpx
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import started

from meshwright.errors import MeshwrightError
from meshwright.serving.http.api_keys import parse_api_keys, parse_limits
from meshwright.serving.http.openai import completions
from meshwright.serving.http.service import RequestLimits

COMPLETION = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    keys = parse_api_keys(["one", "two", "narrow prompt_tokens=64"], RequestLimits(), "f")
    with started(FakeEngine(chat_tokenizer()), api_keys=keys) as found:
        yield found


def ask(server, path, body, key="one"):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=20)


LONG = "a" * 400_000


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", COMPLETION | {"stop_token_ids": list(range(600))}, "stop_token_ids is 600; .* at most 512"),
        ("/v1/completions", {"prompt": ["a"] * 1024, "n": 16, "max_tokens": 300}, "is 4,915,200 tokens"),
        ("/v1/completions", COMPLETION | {f"f{n}": 1 for n in range(30_000)}, "30,002 fields"),
        ("/v1/completions", b'{"prompt":[' + b"0," * 1_100_000 + b"0]}", "1,100,001 values"),
        ("/v1/completions", {"prompt": LONG}, "400,000 characters, which are at least 400,000 tokens; it may have 512"),
        ("/generate", {"prefix_text": [LONG]}, "prefix_text has 400,000 characters"),
        ("/loglikelihood", {"text": [LONG]}, "text has 400,000 characters"),
        ("/v1/embeddings", {"input": LONG}, "input has 400,000 characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages has 400,"),
    ],
)
def test_what_is_too_much_is_refused(server, path, body, said):
    answer = ask(server, path, body)
    assert answer.status_code == 400
    found = answer.json()["error"]["message"]
    assert re.search(said, found), found


def test_braces_and_colons_in_texts_are_no_fields(server):
    answer = ask(server, "/v1/completions", COMPLETION | {"user": '{"a": 1}, "\\' * 30_000})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 65, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a" * 65, "max_tokens": 0, "echo": True, "logprobs": 0}),
        ("/v1/embeddings", {"input": "a" * 65}),
        ("/generate", {"prefix_text": ["a" * 65]}),
        ("/loglikelihood", {"text": ["a" * 65]}),
        ("/loglikelihood", {"prefix_text": ["a" * 65], "text": ["a"]}),
        ("/loglikelihood-rolling", {"text": ["a" * 5000]}),
    ],
)
def test_the_limit_of_prompts_is_one_for_all_endpoints(server, path, body):
    assert ask(server, path, body).status_code == 200
    answer = ask(server, path, body, key="narrow")
    assert answer.status_code == 400
    assert "at most 64" in answer.text or "it may have 64" in answer.text


def test_keys_share_neither_prefixes_nor_rows(server):
    server.engine.requests.clear()
    for key, salt in (("one", ""), ("two", ""), ("one", "mine")):
        assert ask(server, "/v1/completions", COMPLETION | {"cache_salt": salt}, key).status_code == 200
    first, other, salted = server.engine.requests
    assert (first.owner, other.owner, salted.owner) == ("one", "two", "one")
    assert len({first.cache_salt, other.cache_salt, salted.cache_salt}) == 3
    assert len({first.group, other.group, salted.group}) == 3


def test_a_request_holds_few_completions_at_once(server):
    server.engine.requests.clear()
    engine, most = server.engine, 0
    submit = engine.submit

    def counted(request, deliver):
        nonlocal most
        number = submit(request, deliver)
        most = max(most, sum(each.request.num_completions for each in [*engine.running.values()]))
        return number

    engine.submit = counted
    try:
        answer = ask(server, "/v1/completions", {"prompt": ["a"] * 40, "n": 16, "max_tokens": 1})
    finally:
        engine.submit = submit
    assert answer.status_code == 200
    assert most <= 128


def exchange(server, data, *, closes=False):
    """What a client reads that sends bytes, and then no more if it closes its side."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        connection.sendall(data)
        if closes:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def head(version="HTTP/1.1", host="host: localhost\r\n", body=b""):
    return (
        f"POST /v1/completions {version}\r\n{host}authorization: Bearer one\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


def test_a_client_that_closes_its_side_is_answered(server):
    server.engine.step_seconds = 0.1
    try:
        answer = exchange(server, head(body=json.dumps({"prompt": "abc", "max_tokens": 5}).encode()), closes=True)
    finally:
        server.engine.step_seconds = 0.0
    assert answer.startswith(b"HTTP/1.1 102 Processing\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in answer
    assert b'"completion_tokens":5' in answer


def test_a_client_that_is_gone_frees_what_it_held(server):
    server.engine.step_seconds = 0.05
    address = httpx.URL(server.url)
    try:
        with socket.create_connection((address.host, address.port), timeout=10) as connection:
            connection.sendall(head(body=json.dumps({"prompt": "abc", "max_tokens": 400}).encode()))
            began = time.monotonic()
            while not server.engine.running:
                time.sleep(0.01)
                assert time.monotonic() - began < 5
        began = time.monotonic()
        while server.engine.running:
            time.sleep(0.01)
            assert time.monotonic() - began < 5
    finally:
        server.engine.step_seconds = 0.0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (head(host=""), b"has 0 Host headers"),
        (head(host="host: localhost\r\nhost: b\r\n"), b"has 2 Host headers"),
        (b"GET /health\r\n\r\n", b"is in HTTP/0.9"),
    ],
)
def test_another_http_is_refused(server, data, said):
    answer = exchange(server, data)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert said in answer


def test_http_1_0_needs_no_host(server):
    assert exchange(server, b"GET /health HTTP/1.0\r\n\r\n").endswith(b"ok\n")


def test_a_limit_is_set_once():
    with pytest.raises(MeshwrightError, match="--limit sets max_tokens twice, the second time by 'max_tokens=2'"):
        parse_limits(["max_tokens=1", "max_tokens=2"], RequestLimits(), "--limit")


def test_an_exception_in_a_handler_is_in_the_log_under_the_id_of_its_answer(server, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(completions, "engine_request", fail)
    answer = ask(server, "/v1/completions", COMPLETION)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in answer.text
    assert f"error {answer.headers['x-request-id']} ended a request" in caplog.text
    monkeypatch.undo()
    assert ask(server, "/v1/completions", COMPLETION).status_code == 200
