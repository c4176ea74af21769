"""Starting, stopping, keys, clients that go away, limits of time and size: a server beside its engine."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import http_server, started

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.serving.http.api_keys import parse_api_keys
from meshwright.serving.http.service import ApiKey, RequestLimits, Service

LONG = {"prompt": "a", "max_tokens": 500, "temperature": 0}


def slow_engine():
    return FakeEngine(byte_tokenizer(), step_seconds=0.01)


def until(holds, seconds=5.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)


def hang_up(server, num_requests, **body):
    """Ask, and go away once the engine has so many requests."""

    async def ask():
        async with httpx.AsyncClient() as client:
            asking = asyncio.ensure_future(client.post(f"{server.url}/v1/completions", json=LONG | body))
            async with asyncio.timeout(4):
                while len(server.engine.running) < num_requests:
                    await asyncio.sleep(0.005)
            asking.cancel()

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages_at_once(stream):
    with started(slow_engine()) as server:
        hang_up(server, 1, stream=stream)
        until(lambda: server.engine.aborted == ["r0"], seconds=3)
        assert not server.engine.running
        until(lambda: server.service.num_active == 0)
        text = httpx.get(f"{server.url}/metrics").text
        assert "meshwright_http_disconnects_total 1.0" in text


def test_all_prompts_of_a_client_that_goes_away_are_aborted():
    with started(slow_engine()) as server:
        hang_up(server, 3, prompt=["a", "b", "c"])
        until(lambda: sorted(server.engine.aborted) == ["r0", "r1", "r2"], seconds=3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_time_limit(stream):
    with started(slow_engine(), limits=RequestLimits(seconds=0.2)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"stream": stream})
        if stream:
            error = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 408
            assert answer.headers["x-should-retry"] == "false"
            error = answer.json()["error"]
        assert error["code"] == "timeout"
        assert "not complete after 0.2 s" in error["message"]
        until(lambda: server.engine.aborted == ["r0"], seconds=3)


def test_a_fault_of_the_engine_is_an_error_for_its_client():
    engine = slow_engine()
    with started(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="fake/model", **LONG, stream=True)
        next(stream)
        engine.fails_after = 0
        with pytest.raises(openai.APIError, match="the engine failed: the table is broken") as error:
            list(stream)
        assert not isinstance(error.value, openai.APIStatusError)
        # Before anything is sent, of a stream too, it is an answer of its own.
        for options in ({}, {"stream": True}):
            with pytest.raises(openai.InternalServerError, match="the engine failed: the table is broken"):
                client.completions.create(model="fake/model", **LONG, **options)


def test_an_engine_that_takes_no_more_ends_its_server():
    with started(slow_engine()) as server:
        server.engine.is_closed = True
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closed")
        server.thread.join(10)
        assert [str(each) for each in server.errors] == ["the engine is closed"]


def test_api_keys_are_asked_for():
    with started(
        FakeEngine(chat_tokenizer()),
        api_keys=(
            ApiKey("first"),
            ApiKey("sécond"),
        ),
    ) as server:
        base = f"{server.url}/v1"
        for key in ("first", "sécond"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{base}/models", headers=headers).status_code == 200
        for key in ("", "Bearer", "Bearer fir", "Bearer first2", "Basic first"):
            answer = httpx.get(f"{base}/models", headers={"authorization": key})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        with (
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"),
        ):
            client.completions.create(model="fake/model", prompt="a")
        for path in ("/", "/health", "/ready"):
            assert httpx.get(server.url + path).status_code == 200
        for path in ("/metrics", "/openapi.json", "/nothing"):
            assert httpx.get(server.url + path).status_code == 401
        assert httpx.post(f"{server.url}/chat", json={"prompt": "a"}).status_code == 401


def test_each_api_key_has_limits_of_its_own():
    limits = RequestLimits(body_bytes=2000)
    keys = parse_api_keys(["# of people", "wide", "", "narrow requests=1 max_tokens=400 prompt_tokens=3"], limits, "f")
    with started(slow_engine(), api_keys=keys, limits=limits) as server:

        def ask(key, **options):
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", **options}, headers=headers)

        assert ask("wide", max_tokens=1, prompt="abcd").status_code == 200
        assert "the number of tokens of prompt is 4" in ask("narrow", prompt="abcd").text
        assert "max_tokens is 401" in ask("narrow", max_tokens=401).text
        assert ask("narrow", prompt="a" * 3000).status_code == 413
        options = {"json": LONG | {"stream": True, "max_tokens": 400}, "headers": {"authorization": "Bearer narrow"}}
        with httpx.stream("POST", f"{server.url}/v1/completions", **options) as stream:
            lines = stream.iter_lines()  # Kept: httpx closes the connection with it.
            assert next(lines).startswith("data: ")
            refused = ask("narrow", max_tokens=1)
            assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1")
            assert "this API key answers at most 1 requests at once" in refused.text
            assert ask("wide", max_tokens=1).status_code == 200
        until(lambda: ask("narrow", max_tokens=1).status_code == 200)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# none"], "keys.txt has no key"),
        (["k", "k"], "line 2 of keys.txt repeats the key"),
        (["k max=1"], "line 1 of keys.txt has 'max=1'; write NAME=VALUE with one of requests, body_bytes"),
        (["k max_tokens=x"], "max_tokens must be a whole number above 0"),
        (["k seconds=nan"], "seconds must be a number above 0"),
        (["k max_tokens=0"], "max_tokens must be a whole number above 0"),
        (["k head_seconds=1"], "applies before the key is known; use --limit"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_in_a_line(lines, said):
    with pytest.raises(MeshwrightError, match=re.escape(said)):
        parse_api_keys(lines, RequestLimits(), "keys.txt")


def test_pages_of_other_origins_may_call_only_where_they_are_let():
    origin = {"origin": "https://pages.example"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with started(FakeEngine(byte_tokenizer())) as server:
        assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=origin).headers
        assert httpx.options(f"{server.url}/v1/completions", headers=asked).status_code == 403
        # What a browser sends without asking first is not answered.
        body = json.dumps({"prompt": "a"}).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=origin | {"content-type": kind})
            assert answer.status_code == 403
            # Nor one whose origin it leaves out.
            headers = {"content-type": kind}
            assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 415
    with started(
        FakeEngine(byte_tokenizer()), cors_origins=("https://pages.example",), api_keys=(ApiKey("k"),)
    ) as server:
        allowed = httpx.options(f"{server.url}/v1/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://pages.example"
        other = httpx.options(f"{server.url}/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_requests_wait_for_the_start():
    release, lines = threading.Event(), []
    engine = FakeEngine(byte_tokenizer())
    service = Service(engine=engine, model="fake/model", context=512, tokenizer=engine.tokenizer)
    server = http_server(
        service,
        host="127.0.0.1",
        port=0,
        grace_seconds=1,
        start=lambda: release.wait(10) and None,
        on_ready=lines.append,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 503
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert "retry-after" in answer.headers
        assert lines == []
        release.set()
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        until(lambda: lines == [server.url])
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        server.stop()
        thread.join(10)


def test_what_the_start_raises_ends_the_server():
    def start():
        raise MeshwrightError("no such model")

    engine = FakeEngine(byte_tokenizer())
    server = http_server(
        Service(engine=engine, model="m", context=8), host="127.0.0.1", port=0, grace_seconds=1, start=start
    )
    with pytest.raises(MeshwrightError, match="no such model"):
        server.run()


def test_an_engine_that_fails_ends_the_server():
    engine = slow_engine()
    service = Service(engine=engine, model="fake/model", context=512, tokenizer=engine.tokenizer)
    server = http_server(service, host="127.0.0.1", port=0, grace_seconds=60)
    found = {}

    def ask():
        until(lambda: service.is_ready)
        found["answer"] = httpx.post(f"{server.url}/v1/completions", json=LONG)

    thread = threading.Thread(target=ask)
    thread.start()
    failing = threading.Thread(
        target=lambda: (until(lambda: engine.running), service.fail(MeshwrightError("no device")))
    )
    failing.start()
    with pytest.raises(MeshwrightError, match="no device"):
        server.run()
    thread.join()
    failing.join()
    assert found["answer"].status_code == 503
    assert "the engine failed: no device" in found["answer"].text


def test_a_client_that_reads_nothing_is_cut_off():
    # A stream of more than the buffers on its way hold, of which nothing is read.
    engine = FakeEngine(byte_tokenizer())
    with started(engine, context=200_000, limits=RequestLimits(unread_seconds=0.3)) as server:
        body = json.dumps(LONG | {"max_tokens": 150_000, "stream": True, "n": 16}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        address = httpx.URL(server.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((address.host, address.port))
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: engine.aborted == ["r0"], seconds=20)
        until(lambda: server.service.num_active == 0)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = Service(engine=FakeEngine(None), model="m", context=8)
        with pytest.raises(
            MeshwrightError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; --port 0"
        ):
            http_server(service, host="127.0.0.1", port=port, grace_seconds=1)


@pytest.mark.parametrize("grace_seconds", [10.0, 0.2])
def test_a_stop_lets_answers_finish_for_a_while(grace_seconds):
    with started(slow_engine(), grace_seconds=grace_seconds) as server:
        found = {}

        def ask(name, **options):
            found[name] = httpx.post(
                f"{server.url}/v1/completions", json=LONG | {"max_tokens": 60} | options, timeout=20
            )

        threads = [
            threading.Thread(target=ask, args=("whole",)),
            threading.Thread(target=ask, args=("stream",), kwargs={"stream": True}),
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(server.engine.running) == 2)
        with httpx.Client(base_url=server.url) as client:
            client.get("/health")
            server.server.stop()
            until(lambda: server.service.is_draining)
            late = client.post("/v1/completions", json=LONG)
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            assert late.json()["error"]["code"] == "shutting_down"
        for thread in threads:
            thread.join()
        server.thread.join(15)
        assert not server.thread.is_alive()
    if grace_seconds > 1:
        assert [found[name].status_code for name in ("whole", "stream")] == [200, 200]
        assert found["stream"].text.endswith("data: [DONE]\n\n")
        assert server.engine.aborted == []
    else:
        assert found["whole"].status_code == 503
        assert found["whole"].json()["error"]["code"] == "shutting_down"
        assert '"code":"shutting_down"' in found["stream"].text
        assert "[DONE]" not in found["stream"].text
        assert sorted(server.engine.aborted) == ["r0", "r1"]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from meshwright.serving.http.server import serve_http
from meshwright.serving.http.api_keys import parse_api_keys
from meshwright.serving.http.service import Service
from meshwright.execution.text.tokenizer import byte_tokenizer
engine = FakeEngine(byte_tokenizer(), step_seconds=0.01)
service = Service(engine=engine, model="m", context=600, tokenizer=engine.tokenizer)
serve_http(service, port=0, grace_seconds=20, on_ready=lambda url: print("ready on", url, flush=True))
print("done")
"""


@pytest.fixture
def child():
    """A process that serves, and its URL."""
    code = CHILD.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("ready on http://127.0.0.1:"), process.stderr and process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.matrix)])
def test_a_signal_ends_the_process_well_and_a_second_one_at_once(child, number):
    process, url = child

    async def stream():
        """How a stream of 3 s ends that is open while the signals come."""
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}/v1/completions", json=options) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            os.kill(process.pid, number)
            await asyncio.sleep(0.3)
            if number == signal.SIGINT:
                os.kill(process.pid, number)
            return [line async for line in lines]

    options = LONG | {"stream": True, "max_tokens": 100}
    if number == signal.SIGINT:
        with pytest.raises(httpx.RemoteProtocolError):
            asyncio.run(stream())
        assert process.wait(5) == -number
    else:
        assert asyncio.run(stream())[-2] == "data: [DONE]"
        output, errors = process.communicate(timeout=10)
        assert (process.returncode, output, errors) == (0, "done\n", "")
