"""`meshwright serve` as people start it: a process, OpenAI's own client, and a signal in the middle of a request."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
from child_flags import CHILD_FLAGS
from serving_cases import alone, drawn_model

from meshwright.description.families.registry import PRESETS
from meshwright.execution.models.generation.sampling import GREEDY
from meshwright.serving.engine.request import Request

GOLDENS = Path(__file__).parents[1] / "references"
PROMPT = "The mesh has 2 axes"


@contextlib.contextmanager
def served(directory, *words):
    """A server in a process of its own, and a client of it; killed at the end where it still runs."""
    command = [sys.executable, "-m", "meshwright", "serve", str(directory), "--port", "0", *words]
    environment = os.environ | {"XLA_FLAGS": CHILD_FLAGS}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # Read all along, so that the process never waits for its reader.
    said = list[str]()
    reading = threading.Thread(target=lambda: said.extend(process.stderr))
    reading.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("ready on http://127.0.0.1:"), said
        with openai.OpenAI(base_url=f"{line.split()[-1]}/v1", api_key="none", max_retries=0) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        reading.join()
        process.stdout.close()
        process.stderr.close()


def test_a_started_server_answers_openais_client_and_ends_after_its_last_answer(tmp_path):
    model = drawn_model(config=replace(PRESETS["tiny"], num_layers=1))
    model.save(tmp_path / "tiny")
    wanted = alone(model, Request(prompt=list(PROMPT.encode()), max_tokens=20, sampling=GREEDY))
    words = [
        "--on",
        "cpu:2",
        "--mesh",
        "tp=2",
        "--batch",
        "2",
        "--context",
        "1024",
        "--page-size",
        "1024",
        "--chunk",
        "32",
    ]
    with served(tmp_path / "tiny", *words) as (process, client):
        (name,) = [each.id for each in client.models.list()]
        assert name == "tiny"
        options = {"model": name, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        whole = client.completions.create(**options, logprobs=1)
        (choice,) = whole.choices
        assert choice.text == wanted.text
        assert whole.usage.completion_tokens == len(wanted.tokens)
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        pieces = list(client.completions.create(**options, stream=True))
        assert len(pieces) > 3
        assert "".join(piece.choices[0].text for piece in pieces) == wanted.text
        embedding = client.embeddings.create(model=name, input=PROMPT).data[0].embedding
        assert len(embedding) == model.config.embed

        options |= {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        stream = client.completions.create(**options)
        made = list(next(stream).choices[0].token_ids)
        process.send_signal(signal.SIGTERM)
        for piece in stream:
            made += piece.choices[0].token_ids
        assert len(made) == 400
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_signal_ends_a_server_that_still_compiles():
    """Python's own end aborted in XLA while a thread compiled: exit code 134."""
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "serve",
        str(GOLDENS / "gemma3_text"),
        "--on",
        "cpu:8",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert any("sequences at once" in line for line in process.stderr)
            time.sleep(3)  # Within its compilations.
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, process.stderr.read()
        finally:
            process.kill()


CASES = [
    ("llama", "dp=2,tp=4"),
    ("gpt_oss", "ep=2,dp=2,tp=2"),
]
"""Plain attention, and experts beside attention with sinks; `test_http_references.py` has other families."""


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_a_started_server_makes_what_transformers_makes(family, mesh):
    golden = np.load(GOLDENS / family / "golden.npz")
    prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    wanted = golden["continuations"].tolist()
    words = ["--on", "cpu:8", "--mesh", mesh, "--batch", "8", "--context", "64", "--chunk", "16"]
    with served(GOLDENS / family, *words) as (process, client), ThreadPoolExecutor(len(prompts)) as pool:

        def ask(prompt):
            answer = client.completions.create(
                model=family, prompt=prompt, max_tokens=len(wanted[0]), temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            return list(answer.choices[0].token_ids)

        assert list(pool.map(ask, prompts)) == wanted
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
