"""`meshwright.serve`: a server in the main thread of a program, asked from another thread and ended by a signal."""

import json
import os
import signal
import threading
import urllib.request
from dataclasses import replace

import pytest
from serving_cases import alone, drawn_model

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation.sampling import GREEDY
from meshwright.serving.engine.request import Request

PROMPT = "The mesh has 2 axes"
SMALL = {"on": "cpu:2", "mesh": {"tp": 2}, "batch": 2, "context": 64, "page_size": 64, "chunk": 32, "port": 0}


@pytest.fixture(scope="module")
def model():
    return drawn_model(config=replace(PRESETS["tiny"], num_layers=1))


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    model.save(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    return path


def ask(url, **more):
    """The completion of a prompt."""
    body = {"model": "mine", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_program_serves_until_a_signal_and_goes_on(model, directory):
    answers = []

    def on_ready(url):
        answers.append(ask(url)["choices"][0]["text"])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, max_tokens=9)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    options = SMALL | {"name": "mine", "limit": {"max_tokens": 8}}
    with pytest.warns(UserWarning, match="a context of 64 tokens is longer than the 32 that small was trained with"):
        assert mw.serve(directory, on_ready=on_ready, **options) is None
    assert answers == [alone(model, Request(prompt=list(PROMPT.encode()), max_tokens=8, sampling=GREEDY)).text]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_on_ready_raises_ends_the_server(directory):
    def on_ready(url):
        raise LookupError(url)

    with pytest.raises(LookupError, match=r"http://127\.0\.0\.1:"), pytest.warns(UserWarning, match="64 tokens"):
        mw.serve(directory, on_ready=on_ready, **SMALL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": "8000"}, "--port is '8000'; it must be 0 to 65535"),
        ({"grace": "soon"}, "grace is 'soon'; it is a number"),
        ({"kv_dtype": "fp4"}, "--kv-dtype is 'fp4'; it must be int8 or fp8, or left out"),
        ({"cors": 3}, "cors is 3; it is text or a list, of which each is text"),
        ({"limit": "tokens=3"}, "--limit has 'tokens=3'; write NAME=VALUE with one of"),
        ({"batches": 3}, "there is no option 'batches'; did you mean batch?"),
        ({"replicas": 2, "process_id": 1}, "process_id has no effect with replicas; leave it out"),
        ({"replicas": "2"}, "--replicas is '2'; it must be a whole number from 1"),
        ({"start_seconds": 3.0}, "--start-seconds goes with --coordinator"),
        ({"batch": 0}, "batch is 0; it is 1 or more"),
    ],
)
def test_a_wrong_option_is_one_error(directory, options, said):
    with pytest.raises(mw.MeshwrightError) as raised:
        mw.serve(directory, **SMALL | options)
    assert str(raised.value).startswith(said)


def test_only_the_main_thread_serves(directory):
    errors = []

    def run():
        try:
            mw.serve(directory, **SMALL)
        except mw.MeshwrightError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == ["serve runs in the main thread, which alone gets the signals that end it; call it there"]
