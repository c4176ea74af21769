"""How long `/health` of a server takes while it gets requests that are far too large, beside what it takes idle.

The server has a model of one layer with drawn weights, a byte-level tokenizer trained on Python's own sources, and a
context of 1,024 tokens. Each load is sent over and over by two clients while `/health` is asked every 10 ms:

    python benchmarks/server_health.py [--seconds 10] [--port PORT of a server that runs]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}

MAKE = """
import argparse, inspect, json, sys, jax
from dataclasses import replace
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.mesh import MeshShape
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.arrays import initialise
from meshwright.description.step.parameter_tree import parameters
directory = Path(sys.argv[1])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
tokenizer.train([inspect.getsourcefile(module) for module in (argparse, inspect)], trainer)
config = replace(PRESETS["tiny"], name="health", num_layers=1, vocab=2048)
mesh = build_mesh(MeshShape(), jax.devices()[:1])
with jax.set_mesh(mesh):
    params = initialise(parameters(config), jax.random.key(0), mesh, ShardingContext(MeshShape()), "f32")
LoadedModel(config=config, params=params, mesh=mesh, mesh_shape=MeshShape(), system=parse_system("cpu:1"), dtype="f32",
            stored_dtype="f32", tokenizer=None, source={}, seq_len=1024).save(directory)
tokenizer.save(str(directory / "tokenizer.json"))
template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}\\n{% endfor %}"
(directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<end>"}))
"""

WORDS = "the quick brown fox jumps over the lazy dog and def f(x): return x + 1234 "
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"description": WORDS * 55_000}}}
LOADS = {
    "a prompt of 4 MB": ("/v1/completions", {"prompt": WORDS * 55_000}),
    "tools of 4 MB": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
    "250 prompts of 16k": ("/v1/completions", {"prompt": [(WORDS * 220)[:16_000]] * 250, "max_tokens": 1}),
    "200k unknown fields": ("/v1/completions", {"prompt": "a"} | {f"field{number}": 1 for number in range(200_000)}),
    "a list of 2M numbers": ("/v1/completions", {"prompt": [0] * 2_000_000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    with contextlib.nullcontext(args.port) if args.port else served() as port:
        idle = percentile(health_seconds(port, args.seconds))
        print(f"{'':24}{'p99 of /health':>16}{'of idle':>10}{'answers':>10}")
        print(f"{'idle':24}{idle * 1e3:13.1f} ms{1:9.1f}x")
        for name, (path, body) in LOADS.items():
            with sent_over_and_over(port, path, json.dumps(body).encode()) as statuses:
                p99 = percentile(health_seconds(port, args.seconds))
            answers = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
            print(f"{name:24}{p99 * 1e3:13.1f} ms{p99 / idle:9.1f}x   {answers}")


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port of a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MAKE, f"{folder}/model"], env=ENVIRONMENT, check=True)
        words = ["serve", f"{folder}/model", "--on", "cpu:1", "--port", "0", "--batch", "4", "--context", "1024"]
        server = subprocess.Popen(
            [sys.executable, "-m", "meshwright", *words], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def health_seconds(port: int, seconds: float) -> list[float]:
    """How long each `/health` takes."""
    connection, until, found = http.client.HTTPConnection("127.0.0.1", port, timeout=60), time.monotonic() + seconds, []
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        found.append(time.perf_counter() - began)
        time.sleep(0.01)
    connection.close()
    return found


@contextlib.contextmanager
def sent_over_and_over(port: int, path: str, body: bytes) -> Iterator[list[int]]:
    """Two clients that send a request again as soon as it is answered; yields the statuses."""
    statuses, is_over = list[int](), threading.Event()

    def send() -> None:
        while not is_over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", path, body, {"content-type": "application/json"})
            statuses.append(connection.getresponse().status)
            connection.close()

    clients = [threading.Thread(target=send) for _ in range(2)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    yield statuses
    is_over.set()
    for client in clients:
        client.join()


def percentile(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    main()
