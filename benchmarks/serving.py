"""Tokens a second of the server over HTTP, beside a raw decode loop of the same model and sharding, in one run.

The model is a Llama of 40M parameters (8 layers, 512 wide, 8 heads of which 4 have keys, vocab 16,384) with drawn
weights in float32, on 8 simulated devices. Each request has a prompt of 32 tokens and makes 32, greedily. Each way has
a process of its own; they take turns, so that what else the machine does meets all alike, and the median of the rounds
from the third on is printed:

- raw: `models.generation.generate`, all prompts at once, a step after another with the tokens left on the devices;
- server: `meshwright serve`, the requests sent at once over HTTP, each answer in one piece.

"of raw" is the rate beside that of the raw loop with as many rows, "of 8" beside that of the same way with 8. The mesh
is the one on which the raw loop makes most tokens a second, which is with 64 rows. The server prefills up to 2,048
tokens between two decode steps, those of 64 prompts, as the raw loop does, and its pages have 64 tokens.

Two more rows are of the same server after its rounds:

- scoring: the log probabilities of 16 prompts of 8 tokens (`echo`, `max_tokens` 0), beside one token after each of the
  same prompts;
- fairness: one token of a client alone, beside one while another client's request for 128 prompts x 16 completions of
  30 tokens is answered: the longest of 20.

    python benchmarks/serving.py [--mesh dp=2,tp=4] [--rounds 7] [--chunk 2048] [--page-size 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

PROMPT, MADE = 32, 32
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--raw", metavar="DIRECTORY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.raw:
        raw(args.raw, args.mesh)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/llama-40m"
        subprocess.run([sys.executable, "-c", MAKE, directory], env=ENVIRONMENT, check=True)
        options = ("--chunk", str(args.chunk), "--page-size", str(args.page_size))
        rounds, scoring, fairness = asyncio.run(take_turns(directory, args.mesh, args.rounds, options))
    print(f"{'':24}{'tok/s':>10}{'of raw':>10}{'of 8':>10}{'CPU-s / 256 tokens':>22}")
    for name, each in rounds.items():
        way, count = name.split(", ")
        of_raw = median_ratio(each, rounds[f"raw, {count.split()[0]} rows"])
        of_eight = median_ratio(each, rounds[f"{way}, 8 {count.split()[1]}"])
        rate, cpu = (statistics.median(column) for column in zip(*each, strict=True))
        print(f"{name:24}{rate:10.1f}{of_raw:9.2f}x{of_eight:9.2f}x{cpu:22.2f}")
    for name, (seconds, beside) in {"scoring": scoring, "fairness": fairness}.items():
        print(f"{name:24}{seconds * 1e3:7.0f} ms{seconds / beside:9.2f}x of {beside * 1e3:.0f} ms")


def median_ratio(rounds: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The median over rounds of the rate beside another one of the same round."""
    return statistics.median(rate / other for (rate, _), (other, _) in zip(rounds, others, strict=True))


def wait_compiled(url: str) -> None:
    """Wait until a server has compiled all of its programs, which goes on after it is ready."""
    while b"meshwright_uncompiled_programs 0.0" not in urllib.request.urlopen(f"{url}/metrics").read():
        sleep(0.2)


async def take_turns(
    directory: str, mesh: str, rounds: int, options: tuple[str, ...]
) -> tuple[dict[str, list[tuple[float, float]]], tuple[float, float], tuple[float, float]]:
    """Of each way, the tokens a second and CPU-seconds for 256 tokens of each round but the first two.

    Then the seconds of scoring and those that it stands beside, and the same of fairness.
    """
    words = [sys.executable, __file__, "--raw", directory, "--mesh", mesh]
    alone = subprocess.Popen(words, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    words = [sys.executable, "-m", "meshwright", "serve", directory, "--on", "cpu:8", "--mesh", mesh, "--port", "0"]
    words += ["--batch", "64", "--context", "128", "--no-prefix-cache", *options]
    server = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert alone.stdin is not None
    assert alone.stdout is not None
    assert server.stdout is not None
    client = None
    try:
        url = server.stdout.readline().split()[-1]
        wait_compiled(url)
        client = Client(url)
        found: dict[str, list[tuple[float, float]]] = {}
        for number in range(rounds):
            seconds, used = dict[str, float](), dict[str, float]()
            for count in (8, 64):
                cpu = cpu_seconds(alone.pid)
                print(count, file=alone.stdin, flush=True)
                seconds[f"raw, {count} rows"] = float(alone.stdout.readline())
                used[f"raw, {count} rows"] = cpu_seconds(alone.pid) - cpu
            for count in (8, 64):
                cpu = cpu_seconds(server.pid)
                seconds[f"server, {count} requests"] = await client.complete(prompts(count))
                used[f"server, {count} requests"] = cpu_seconds(server.pid) - cpu
            for name, taken in seconds.items():
                tokens = MADE * int(name.split()[1])
                if number >= 2:
                    found.setdefault(name, []).append((tokens / taken, used[name] * 256 / tokens))
        return found, await scoring(client), await fairness(client)
    finally:
        if client is not None:
            client.close()
        alone.stdin.close()
        server.send_signal(signal.SIGTERM)
        alone.wait(60)
        server.wait(60)


MAKE = """
import sys, jax
from dataclasses import replace
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.mesh import MeshShape
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.arrays import initialise
from meshwright.description.step.parameter_tree import parameters
base = PRESETS["tiny"]
config = replace(base, name="llama-40m", num_layers=8, embed=512, mlp=1408, num_heads=8, num_kv_heads=4, head_dim=64,
                 vocab=16384)
shape = MeshShape()
mesh = build_mesh(shape, jax.devices()[:1])
with jax.set_mesh(mesh):
    params = initialise(parameters(config), jax.random.key(0), mesh, ShardingContext(shape), "f32")
model = LoadedModel(config=config, params=params, mesh=mesh, mesh_shape=shape, system=parse_system("cpu:1"),
                    dtype="f32", stored_dtype="f32", tokenizer=None, source={}, seq_len=2048)
model.save(sys.argv[1])
"""


def prompts(count: int) -> list[list[int]]:
    """Prompts of which none begins as another does."""
    return [[(37 * row + 11 * place + row * place) % 16384 for place in range(PROMPT)] for row in range(count)]


def raw(directory: str, mesh: str) -> None:
    """A decode loop whose tokens stay on the devices until the end, for the rows of each line that comes: seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw
    from meshwright.execution.models.generation.generate import (
        cache_split,
        decode_layout,
        placed_params,
        programs,
        prompt_layout,
    )
    from meshwright.execution.models.generation.sampling import Written, likeliest_of

    model = mw.load(directory, on="cpu:8", mesh=mesh)
    split = cache_split(model.config, model.mesh_shape, 8)
    layout = decode_layout(model.config, model.mesh_shape, split)
    of_prompts = prompt_layout(model.config, model.mesh_shape, split)
    with jax.set_mesh(model.mesh):
        params = placed_params(model.params, model.config, layout)
        for line in sys.stdin:
            rows = int(line)
            prefill, decode = programs(
                model.config, model.mesh_shape, split, rows, PROMPT + MADE, jnp.dtype(jnp.float32)
            )
            samplers = likeliest_of(jnp.zeros(rows, jnp.uint32))
            tokens = jax.device_put(np.array(prompts(rows), np.int32), of_prompts.spec("batch", "sequence"))
            began = perf_counter()
            chosen, caches, written = prefill(
                params, tokens, jnp.full(rows, PROMPT, jnp.int32), samplers, Written(), jnp.int32(0)
            )
            made = [chosen]
            for number in range(1, MADE):
                chosen, caches, written = decode(
                    params, chosen, caches, np.full(rows, PROMPT + number - 1, np.int32), samplers, written,
                    np.int32(number),
                )  # fmt: skip
                made.append(chosen)
            jax.block_until_ready(made)
            print(perf_counter() - began, flush=True)


class Client:
    """Keep-alive connections to a server, one for each request of a round.

    It writes HTTP itself: httpx takes 10 ms of these two cores for each of 64 requests that are sent at once.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def complete(self, prompts: list[list[int]]) -> float:
        """Send a request for each prompt at once; returns the seconds until all answers are here."""
        body = {"max_tokens": MADE, "temperature": 0, "ignore_eos": True}
        return await self.ask([body | {"prompt": prompt} for prompt in prompts])

    async def ask(self, bodies: list[dict[str, Any]]) -> float:
        """Send a request for each body at once; returns the seconds until all answers are here."""
        while len(self._connections) < len(bodies):
            self._connections.append(await asyncio.open_connection(self._host, self._port))
        requests = [self._request(json.dumps(body).encode()) for body in bodies]
        began = perf_counter()
        for (_, writer), request in zip(self._connections, requests, strict=False):
            writer.write(request)
        answers = [await self._answer(reader) for reader, _ in self._connections[: len(bodies)]]
        seconds = perf_counter() - began
        for body, answer in zip(bodies, answers, strict=True):
            assert json.loads(answer)["usage"]["completion_tokens"] == body["max_tokens"], answer
        return seconds

    def _request(self, body: bytes) -> bytes:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    @staticmethod
    async def _answer(reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.splitlines() if line.startswith("content-length:"))
        return await reader.readexactly(int(length.partition(":")[2]))

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._connections:
            writer.close()


async def scoring(client: Client) -> tuple[float, float]:
    """The seconds of 16 prompts that are scored, and of one token after each; the shortest of 5, after two."""
    short = [prompt[:8] for prompt in prompts(16)]
    score = [{"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0} for prompt in short]
    token = [{"prompt": prompt, "max_tokens": 1, "temperature": 0} for prompt in short]
    taken = [(await client.ask(score), await client.ask(token)) for _ in range(7)][2:]
    return min(seconds for seconds, _ in taken), min(seconds for _, seconds in taken)


async def fairness(client: Client) -> tuple[float, float]:
    """The longest of 20 single tokens beside a request for very many, and the longest of 20 alone."""
    token = {"prompt": prompts(1)[0][:8], "max_tokens": 1, "temperature": 0}
    alone = max([await client.ask([token]) for _ in range(20)])
    many = {"prompt": [prompt[:8] for prompt in prompts(128)], "n": 16, "max_tokens": 30, "ignore_eos": True}
    other = Client(client.url)
    task = asyncio.create_task(other.ask([many]))
    await asyncio.sleep(1.0)
    beside = max([await client.ask([token]) for _ in range(20)])
    assert not task.done(), "the large request was over too soon"
    task.cancel()
    other.close()
    return beside, alone


def cpu_seconds(pid: int) -> float:
    """The processor time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
