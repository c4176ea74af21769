"""A started server under many short requests, some malformed and some of clients that hang up: what is answered, and
what the process holds before and after.

The model is of one small layer on bytes, with drawn weights. Of the requests, sent by a number of clients at once, one
in ten hangs up after its first token, one in twenty is malformed, and half of the others are streams. After each tenth
of them, the first being the warm-up, the server is left idle and asked what it holds. At the end it gets SIGTERM with
as many requests in the middle of their texts.

    python benchmarks/serving_load.py [--requests 10000] [--clients 200] [--on cpu:4] [--mesh dp=2,tp=2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import psutil

TENTHS = 10
PATH = "/v1/completions"
LONGEST_PROMPT, MOST_TOKENS, CONTEXT = 40, 24, 128
MALFORMED: tuple[dict[str, Any], ...] = (
    {"content": b'{"prompt": '},
    {"content": b'{"prompt": "a", "temperature": NaN}'},
    {"content": b'{"prompt": "\xff\xfe"}'},
    {"json": {"prompt": "a", "max_tokens": -1}},
    {"json": {"prompt": "a", "temprature": 1}},
    {"json": {"prompt": "a" * 2 * CONTEXT}},
    {"json": {"prompt": [1 << 20]}},
)
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
from meshwright.execution.text.tokenizer import byte_tokenizer
config, shape = replace(PRESETS["tiny"], name="tiny-1", num_layers=1), MeshShape()
mesh = build_mesh(shape, jax.devices()[:1])
with jax.set_mesh(mesh):
    params = initialise(parameters(config), jax.random.key(0), mesh, ShardingContext(shape), "f32")
LoadedModel(config=config, params=params, mesh=mesh, mesh_shape=shape, system=parse_system("cpu:1"), dtype="f32",
            stored_dtype="f32", tokenizer=byte_tokenizer(), source={}, seq_len=512).save(sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--on", default="cpu:4")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--no-prefix-cache", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", MAKE, f"{folder}/tiny-1"],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}, check=True,
        )  # fmt: skip
        words = [sys.executable, "-m", "meshwright", "serve", f"{folder}/tiny-1", "--on", args.on, "--mesh", args.mesh]
        words += ["--batch", "64", "--context", str(CONTEXT), "--port", "0"]
        words += ["--no-prefix-cache"] * args.no_prefix_cache
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            asyncio.run(load(url, process, args.requests, args.clients))
        finally:
            process.kill()
            process.wait()


async def load(url: str, process: subprocess.Popen[str], count: int, clients: int) -> None:
    """The requests, in tenths, and what the server holds after each; then SIGTERM in the middle of more."""
    told, seconds, began = Counter[str](), list[float](), perf_counter()
    print("requests   pages   threads   file descriptors   RSS (MiB)")
    for tenth in range(TENTHS):
        draw = random.Random(tenth)
        kinds = draw.choices(["hangs up", "malformed", "valid"], [10, 5, 85], k=count // TENTHS)
        found, times = await send(url, kinds, clients, draw)
        told += found
        seconds += times
        print(f"{(tenth + 1) * (count // TENTHS):8}{await held(url, process)}", flush=True)
    lasted = perf_counter() - began
    for what, number in sorted(told.items()):
        print(f"{what}: {number}")
    middle, late = np.percentile(seconds, [50, 99])
    print(
        f"of valid requests: p50 {middle * 1000:.0f} ms, p99 {late * 1000:.0f} ms; {sum(told.values()) / lasted:.0f}/s"
    )
    ends = await stopped(url, process, clients)
    print(f"SIGTERM among {clients} requests: {', '.join(f'{ends[what]} {what}' for what in sorted(ends))}")
    print(f"exit code {process.wait(60)}")


async def send(url: str, kinds: list[str], clients: int, draw: random.Random) -> tuple[Counter[str], list[float]]:
    """What became of requests of some kinds, so many at once, and the seconds of the valid ones."""
    told, seconds, left = Counter[str](), list[float](), iter(kinds)

    async def client(own: random.Random) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for kind in left:
                if kind == "malformed":
                    answer = await http.post(PATH, headers=JSON, **own.choice(MALFORMED))
                    told[f"malformed, answered {answer.status_code // 100}xx"] += 1
                elif kind == "hangs up":
                    told[await hang_up(http, own)] += 1
                else:
                    began = perf_counter()
                    told[await ask(http, own)] += 1
                    seconds.append(perf_counter() - began)

    await asyncio.gather(*(client(random.Random(draw.random())) for _ in range(clients)))
    return told, seconds


JSON = {"content-type": "application/json"}


def body(draw: random.Random, most: int = MOST_TOKENS) -> dict[str, Any]:
    """A valid request."""
    prompt = [draw.randrange(256) for _ in range(draw.randint(1, LONGEST_PROMPT))]
    options = {"ignore_eos": True, "temperature": draw.choice([0, 1]), "stream": draw.random() < 0.5}
    return {"prompt": prompt, "max_tokens": draw.randint(1, most)} | options


async def ask(http: httpx.AsyncClient, draw: random.Random) -> str:
    """Ask, and say whether all tokens came."""
    wanted = body(draw) | {"return_token_ids": True}
    answer = await http.post(PATH, json=wanted)
    if answer.status_code != 200:
        return f"valid, answered {answer.status_code}"
    return "valid, answered" if num_tokens(answer.text, wanted["stream"]) == wanted["max_tokens"] else "valid, cut"


def num_tokens(text: str, is_stream: bool) -> int:
    """The tokens of an answer; of a stream without its end none."""
    if not is_stream:
        return len(json.loads(text)["choices"][0]["token_ids"])
    *pieces, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if end != "[DONE]":
        return 0
    return sum(len(choice["token_ids"]) for piece in pieces for choice in json.loads(piece).get("choices", []))


async def hang_up(http: httpx.AsyncClient, draw: random.Random) -> str:
    """Close the connection after the first token."""
    wanted = body(draw) | {"stream": True, "max_tokens": 80}
    async with http.stream("POST", PATH, json=wanted) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return "hung up after a token" if line != "data: [DONE]" else "too late to hang up"
    return "not answered a token"


async def held(url: str, process: subprocess.Popen[str]) -> str:
    """What the server holds once it is idle."""
    of_process = psutil.Process(process.pid)
    async with httpx.AsyncClient(base_url=url) as http:
        while (found := numbers(await http.get("/metrics")))["running"] or found["queued"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        pages, files = numbers(await http.get("/metrics"))["used_pages"], of_process.num_fds()
    memory = of_process.memory_info().rss / 2**20
    return f"{pages:8.0f}{of_process.num_threads():10}{files:19}{memory:12.0f}"


def numbers(answer: httpx.Response) -> dict[str, float]:
    """The engine's numbers of `/metrics`."""
    lines = [line.split() for line in answer.text.splitlines() if line.startswith("meshwright_") and "{" not in line]
    return {name.removeprefix("meshwright_"): float(value) for name, value in lines}


async def stopped(url: str, process: subprocess.Popen[str], clients: int) -> Counter[str]:
    """What becomes of requests in the middle of which the server gets SIGTERM."""
    ends = Counter[str]()

    async def client(draw: random.Random) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            wanted = body(draw) | {"max_tokens": 80, "return_token_ids": True}
            try:
                answer = await http.post(PATH, json=wanted)
            except httpx.HTTPError as error:
                ends[f"ended without an answer ({type(error).__name__})"] += 1
                return
            if answer.status_code == 200 and num_tokens(answer.text, wanted["stream"]) == 80:
                ends["finished"] += 1
            else:
                has_error = '"error"' in answer.text
                ends[f"told an error ({answer.status_code})" if has_error else "cut"] += 1

    asking = [asyncio.ensure_future(client(random.Random(number))) for number in range(clients)]
    async with httpx.AsyncClient(base_url=url) as http:
        while numbers(await http.get("/metrics"))["running"] < min(clients, 32):
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*asking)
    return ends


if __name__ == "__main__":
    main()
