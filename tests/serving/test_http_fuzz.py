"""Hostile and random requests: each gets an answer below 500, soon, and leaves nothing in the engine."""

import json
import socket
import time
from urllib.parse import quote

import httpx
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from started import started

from meshwright.serving.http.service import RequestLimits

SECONDS = 5.0
"""Within which each request is answered."""

LIMITS = RequestLimits(body_seconds=0.5, head_seconds=0.5, max_tokens=8)


@pytest.fixture(scope="module")
def server():
    with started(FakeEngine(chat_tokenizer()), limits=LIMITS) as found:
        yield found
        assert found.service.num_active == 0
        assert not found.engine.running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=SECONDS) as made:
        yield made


@pytest.fixture(scope="module")
def described(client):
    return client.get("/openapi.json").json()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def mostly(valid, other):
    return st.one_of(valid, valid, valid, valid, valid, valid, valid, other)


def values(schema, schemas, depth=0):
    """Values that a schema describes, now and then others."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of([values(one, schemas, depth) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return mostly(st.sampled_from(schema.get("enum", [schema.get("const")])), st.text(max_size=5))
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: values(one, schemas, depth + 1) for name, one in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields) if depth < 4 else st.just({})
    if kind == "object":
        of = schema.get("additionalProperties")
        inner = values(of, schemas, depth + 1) if isinstance(of, dict) else JSON
        return st.dictionaries(st.sampled_from(["1", "65", "x", "type"]), inner, max_size=3)
    if kind == "array":
        return st.lists(values(schema["items"], schemas, depth + 1), max_size=3)
    least = max(schema.get("minimum", schema.get("exclusiveMinimum", 0)), -100)
    most = max(least, min(schema.get("maximum", 8), 8))
    plain = {
        "integer": mostly(st.integers(least, most), st.sampled_from([-2, 2**31, 2**70])),
        "number": mostly(st.floats(least, most), st.sampled_from([-7, -0.0, 1e300])),
        "boolean": st.booleans(),
        "string": mostly(st.sampled_from(["fake/model", "a", "aé"]), st.text(max_size=12)),
        "null": st.none(),
    }
    return plain.get(kind, JSON)


def check_answer(answer):
    """The answer is none of a fault, and an error says what is wrong."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 600
        assert error["type"] in ("invalid_request_error", "authentication_error", "rate_limit_error")


def paths(described):
    return [path for path, operations in described["paths"].items() if "post" in operations]


def test_the_document_is_of_every_endpoint(described):
    assert set(paths(described)) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
        "/generate", "/greedy-until", "/loglikelihood", "/loglikelihood-rolling", "/chat",
    }  # fmt: skip
    text = json.dumps(described)
    for name in set(described["components"]["schemas"]):
        assert f'"#/components/schemas/{name}"' in text, f"nothing refers to {name}"
    assert {"/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/{name}"} < set(described["paths"])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_what_the_document_describes_is_answered(client, described, data):
    path = data.draw(st.sampled_from(paths(described)))
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(values(schema, described["components"]["schemas"]))
    check_answer(client.post(path, json=body))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_json_and_any_bytes_are_answered(client, described, data):
    path = data.draw(st.sampled_from(paths(described)))
    body = data.draw(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    check_answer(answer)
    assert answer.status_code == 400


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]), st.text(max_size=12))
def test_any_path_is_answered(client, method, text):
    answer = client.request(method, f"/{quote(text)}")
    assert answer.status_code < 500


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HOSTILE = {
    "utf-8": (b'{"prompt": "\xff\xfe"}', 400),
    "surrogate": (b'{"prompt": "\\ud800"}', 400),
    "nan": (b'{"prompt": "a", "temperature": NaN}', 400),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', 400),
    "overflow": (b'{"prompt": "a", "temperature": 1e999}', 400),
    "long number": (b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", 400),
    **{  # Of as many digits as Python reads; a message does not repeat them.
        f"long {name}": (b'{"prompt": "a", "%s": %s}' % (name.encode(), b"9" * 4000), 400)
        for name in ("max_tokens", "n", "logprobs", "min_tokens", "best_of")
    },
    "deep list": (DEEP, 400),
    "deep schema": (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
    "nan in a schema": (b'{"prompt": "a", "guided_json": {"minimum": 1e999}}', 400),
    "negative": (b'{"prompt": "a", "max_tokens": -1}', 400),
    "many wrong": (b'{"prompt": [' + b"-1," * 500_000 + b"-1]}", 400),
    "many names": (
        b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": "x"' % n for n in range(200_000)) + b"}}",
        400,
    ),
    "many unknown": (b'{"prompt": "a", ' + b",".join(b'"f%d": 1' % n for n in range(200_000)) + b"}", 400),
    "long prompt": (b'{"prompt": "' + b"a" * 4_000_000 + b'"}', 400),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413),
    "100 MB": (b'{"prompt": "' + b"a" * 100_000_000 + b'"}', 413),
    "zero": (b"\0" * 100, 400),
    "no body": (b"", 400),
    "a name of two lines": (b'{"\\n": false}', 400),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused(client, name):
    body, status = HOSTILE[name]
    started = time.monotonic()
    try:
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    except httpx.WriteError:
        # Over what is read and thrown away, a client that continues sending is cut off.
        assert name == "100 MB"
    else:
        check_answer(answer)
        assert answer.status_code == status
    assert time.monotonic() - started < SECONDS
    assert client.get("/health").status_code == 200


def test_a_body_of_unknown_length_is_counted(client):
    def parts():
        for _ in range(100):
            yield b"a" * 100_000

    answer = client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def raw(server, *parts, pause=0.0):
    """What a server answers to bytes, until it closes."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=SECONDS) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET /health HTTP/1.1\r\n", b"x: y\r\n" * 10_000], 431),
        ([b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000], 431),
        ([b"GET /" + b"a" * 100_000], 431),
        ([b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"y" * 40_000 + b"\r\n\r\n"], 431),
        # Heads and bodies that do not come.
        ([b""], 408),
        ([b"GET /health HT"], 408),
        ([HEAD + b"content-length: 100\r\n\r\n{"], 408),
        # No HTTP.
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01"], 400),
        ([b"GET / HTTP/9.9\r\n\r\n"], 400),
        ([HEAD + b"content-length: -1\r\n\r\n"], 400),
        ([HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], 400),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], 400),
        ([b"GET /\xff HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"], 400),
    ],
)
def test_a_hostile_connection_is_answered_and_closed(server, client, parts, status):
    found = raw(server, *parts)
    assert found.startswith(b"HTTP/1.1 %d " % status), found[:200]
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["message"]
    assert client.get("/health").status_code == 200


def test_many_slow_connections_do_not_keep_others_from_being_answered(server, client):
    address = httpx.URL(server.url)
    slow = [socket.create_connection((address.host, address.port)) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200
    for connection in slow:
        connection.settimeout(SECONDS)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
