"""Requests for other hosts, and of pages of other sites."""

import httpx
import pytest
from fake_engine import FakeEngine
from started import started

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.serving.http.hosts import check_cors, check_hosts, refuse_foreign
from meshwright.serving.http.service import ApiKey

EVIL = {"host": "evil.com:8811", "origin": "http://evil.com:8811"}


def refused(host=None, origin=None, *, bound="127.0.0.1", allowed=(), origins=(), has_keys=False):
    headers = [(name, value.encode()) for name, value in ((b"host", host), (b"origin", origin)) if value is not None]
    found = refuse_foreign(headers, bound, allowed, origins, has_keys)
    return None if found is None else (found.status, found.body.error.code)


HOST, ORIGIN = (403, "host_not_allowed"), (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"host": "evil.com:8811"}, HOST),
        ({"host": "localhost.evil.com"}, HOST),
        ({"host": "127.0.0.1.evil.com"}, HOST),
        ({"host": "192.168.1.5:8000"}, HOST),
        ({"host": ""}, HOST),
        *[({"host": name}, None) for name in ("localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1:8000")],
        *[({"host": name}, None) for name in ("127.1.2.3", "[::1]:8000", "localhost.:8000")],
        ({}, None),
        ({"host": "192.168.1.5:8000", "bound": "0.0.0.0"}, None),
        ({"host": "[fe80::1]:8000", "bound": "::"}, None),
        ({"host": "evil.com", "bound": "0.0.0.0"}, HOST),
        ({"host": "gpu1:8000", "bound": "gpu1"}, None),
        ({"host": "GPU1.example.com:8000", "allowed": ("gpu1.example.com",)}, None),
        ({"host": "evil.com", "allowed": ("*",)}, None),
        # A key is no leave to be another host.
        ({"host": "evil.com", "has_keys": True}, HOST),
        ({"host": "localhost", "origin": "http://evil.com"}, ORIGIN),
        ({"host": "localhost", "origin": "null"}, ORIGIN),
        ({"host": "localhost", "origin": "http://localhost:3000"}, None),
        ({"host": "localhost", "origin": "http://evil.com", "has_keys": True}, None),
        ({"host": "localhost", "origin": "http://evil.com", "origins": ("http://evil.com",)}, None),
        ({"host": "localhost", "origin": "null", "origins": ("*",)}, None),
    ],
)  # fmt: skip
def test_a_request_is_for_this_server_and_of_no_other_page(fields, wanted):
    assert refused(**fields) == wanted


def test_a_page_without_an_origin_is_told_of_no_option_that_is_refused():
    found = refuse_foreign([(b"host", b"localhost"), (b"origin", b"null")], "127.0.0.1", (), (), has_keys=False)
    assert found is not None
    assert "--cors" not in found.body.error.message


def test_a_server_without_keys_answers_no_page_that_resolved_its_name_to_this_machine():
    with started(FakeEngine(byte_tokenizer())) as server:
        for path in ("/", "/v1/models", "/metrics"):
            found = httpx.get(f"{server.url}{path}", headers=EVIL)
            assert found.status_code == 403
            assert "--allowed-host evil.com allows it" in found.json()["error"]["message"]
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=EVIL).status_code == 403
        assert not server.engine.requests
        assert httpx.get(f"{server.url}/health", headers=EVIL).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    with started(FakeEngine(byte_tokenizer()), api_keys=(ApiKey("k"),), allowed_hosts=("evil.com",)) as server:
        headers = EVIL | {"authorization": "Bearer k"}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        *[(check_cors, value, f"--cors has {value!r}; an origin is a scheme, a host and maybe a port")
          for value in ("notaurl", "https://a.com/", "https://a.com/b", "https://", "http://a.com:x", "a.com:80", "")],
        *[(check_hosts, value, f"--allowed-host has {value!r}; it must be a host name without scheme and port")
          for value in ("http://a.com", "a.com:80", "a b", "", "a/b")],
    ],
)  # fmt: skip
def test_what_is_no_origin_or_host_is_refused(check, value, message):
    with pytest.raises(MeshwrightError) as error:
        check([value])
    assert message in str(error.value)


def test_origins_and_hosts_are_taken_as_browsers_write_them():
    origins = ("https://chat.example.com", "http://localhost:3000", "chrome-extension://abc", "*")
    assert check_cors(origins) == origins
    assert check_hosts(("GPU1.example.com", "fe80::1", "*")) == ("gpu1.example.com", "fe80::1", "*")
