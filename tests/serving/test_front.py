"""A front and its replicas: who answers, what follows where one is killed, and how all end."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from started import started

from meshwright.cli.main import main
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.serving.front.app import Front
from meshwright.serving.http.server import HttpServer
from meshwright.serving.http.service import ApiKey, RequestLimits, ServerState

LLAMA = Path(__file__).parents[1] / "references" / "llama"
OUTER = ApiKey("outer", RequestLimits(prompt_tokens=8))
LONG = {"prompt": "a", "max_tokens": 400, "temperature": 0}


@dataclass
class Behind:
    """A replica of a front, started once."""

    url: str | None
    starts: int = 1


@contextlib.contextmanager
def front_of(*replicas, **options):
    """A front on a port of this machine; its address."""
    state, ready = ServerState(**options), threading.Event()
    front = Front(state, replicas, "inner")
    server = HttpServer(
        state, front.app(), front.fail, host="127.0.0.1", port=0, grace_seconds=1, on_ready=lambda url: ready.set(),
        close=front.close,
    )  # fmt: skip
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(15)
        assert not thread.is_alive()


def test_a_replica_that_is_gone_is_passed_over_and_a_client_that_goes_frees_its_pages():
    engine = FakeEngine(byte_tokenizer(), step_seconds=0.01)
    with (
        started(engine, api_keys=(ApiKey("inner"), OUTER)) as server,
        front_of(Behind("http://127.0.0.1:9"), Behind(server.url), api_keys=(OUTER,)) as url,
    ):
        key = {"authorization": "Bearer outer"}
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 3}, headers=key)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        wrong = httpx.post(f"{url}/v1/completions", json={"temprature": 1}, headers=key)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temprature")
        too_long = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 9}, headers=key)
        assert "the number of tokens of prompt is 9" in too_long.text
        numbers = httpx.get(f"{url}/metrics", headers=key).text
        assert 'meshwright_front_retries_total{why="lost"}' in numbers
        assert 'meshwright_num_steps_total{replica="1"}' in numbers
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, headers=key) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        end = time.monotonic() + 5
        while engine.running:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert engine.aborted


def test_a_connection_that_ends_while_it_is_opened_is_a_replica_that_is_lost(monkeypatch):
    """Under load a killed replica once ended requests with 500: its sockets were gone before they were looked at."""
    handle, failed = httpx.AsyncHTTPTransport.handle_async_request, []

    async def fail_first(self, request):
        if not failed:
            failed.append(request)
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")
        return await handle(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail_first)
    with (
        started(FakeEngine(byte_tokenizer()), api_keys=(ApiKey("inner"),)) as server,
        front_of(Behind(server.url), Behind(server.url)) as url,
    ):
        answer = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 3})
        assert (answer.status_code, len(failed)) == (200, 1)


def test_with_no_replica_a_client_is_told_to_come_back():
    with front_of(Behind(None), Behind(None)) as url:
        answer = httpx.post(f"{url}/v1/completions", json=LONG)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "3"], "4 devices cannot be divided equally among 3 replicas"),
        (["--replicas", "0"], "among 0 replicas"),
        (["--replicas", "2", "--process-id", "1"], "--process-id has no effect with --replicas"),
        (["--on", "v5e:2x2", "--replicas", "2"], "have dp=2 in --mesh"),
    ],
)
def test_replicas_that_cannot_be_are_refused_in_a_line(words, said, capsys):
    assert main(["serve", str(LLAMA), *([] if "--on" in words else ["--on", "cpu:4"]), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.matrix
def test_a_killed_replica_costs_no_answer_and_is_started_again(tmp_path):
    golden, words = np.load(LLAMA / "golden.npz"), ["--batch", "4", "--context", "64", "--chunk", "16", "--port", "0"]
    command = [sys.executable, "-m", "meshwright", "serve", str(LLAMA), "--on", "cpu:4", "--mesh", "tp=2", *words]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen([*command, "--replicas", "2"], text=True, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready on "), (tmp_path / "stderr").read_text()
        url, found = line.split()[-1], []
        prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
        wanted = golden["continuations"].tolist()

        def ask(number):
            body = {"prompt": prompts[number], "max_tokens": len(wanted[number]), "temperature": 0}
            for _ in range(10):
                answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
                found.append((answer.status_code, answer.json()["choices"][0]["token_ids"] == wanted[number]))

        asking = [threading.Thread(target=ask, args=(number % len(prompts),)) for number in range(8)]
        for thread in asking:
            thread.start()
        time.sleep(0.2)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        killed = int(children.stdout.split()[0])
        subprocess.run(["kill", "-9", str(killed)], check=True)
        for thread in asking:
            thread.join()
        assert found == [(200, True)] * 80
        end = time.monotonic() + 120
        while httpx.get(f"{url}/metrics").text.count("meshwright_num_steps_total{") < 2:
            assert time.monotonic() < end, (tmp_path / "stderr").read_text()
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "was ended by SIGKILL; it is started again in 1 s" in (tmp_path / "stderr").read_text()
    finally:
        process.kill()
        process.communicate()
