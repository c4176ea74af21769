"""Trials of serving: a started server, or two replicas behind a front, under requests of every kind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from fault_trials import Command, Trial, is_plain
from serving_load import JSON, MAKE, MALFORMED, PATH, numbers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))
from test_http_fuzz import HOSTILE

CONTEXT, CLIENTS, MAX_QUEUE = 128, 48, 64
RSS_GROWTH = 0.05
"""What the resident memory of a server may grow by after the first fifth of a trial's requests."""

ALONE = "A request is answered as it is alone, whatever else the server does"
ENDED = "Each open request is answered or ended with a documented status, and none is left in the engine"
HOSTILES = "A hostile or damaged body gets 4xx and one line, and the requests beside it their answers"
FLOOD = "Over the queue's limit requests get 429, and those within it their answers"
DRAIN = "SIGTERM completes all accepted requests, refuses new ones, and ends with 0"
REPLICA = "If a replica is killed, requests that had no answer yet are answered by another, and it is started again"
MEMORY = f"Memory is flat: it grows by at most {RSS_GROWTH:.0%} after the first fifth of the requests; no page is lost"
PLAIN = "The server prints no traceback"
PROMISES = (ALONE, ENDED, HOSTILES, FLOOD, DRAIN, REPLICA, MEMORY, PLAIN)
DOCUMENTED = {200, 400, 408, 413, 429, 503}


@dataclass
class Server:
    """A running server."""

    command: Command
    url: str
    expected: dict[int, Any]
    """The answers to `POOL`, each asked alone."""


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Requests of every kind whose answers do not depend on chance: greedy, or with a seed."""
    made = []
    for number in range(48):
        body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "ignore_eos": True, "return_token_ids": True}
        shared = [7] * rng.choice((0, 0, 20, 40))
        body["prompt"] = shared + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        body |= rng.choice([{"temperature": 0}, {"temperature": 1, "seed": number}, {"top_p": 0.9, "seed": number}])
        body |= rng.choice([{}, {}, {"n": 2}, {"logprobs": 2}, {"stop": "e"}, {"presence_penalty": 1.0}])
        if rng.random() < 0.1:
            body |= {"guided_regex": "[a-z]{3,9}", "ignore_eos": False}
        made.append(body)
    return made


def answer_of(text: str, is_stream: bool) -> Any:
    """Tokens, text and reason of each choice; None of a stream that has no end."""
    found: dict[int, list[Any]] = {}
    if is_stream:
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        if not lines or lines[-1] != "[DONE]":
            return None
        pieces = [json.loads(line) for line in lines[:-1]]
    else:
        pieces = [json.loads(text)]
    for choice in (choice for piece in pieces for choice in piece.get("choices", [])):
        ids, said, why = found.setdefault(choice["index"], [[], "", None])
        ids += choice.get("token_ids") or []
        found[choice["index"]] = [ids, said + choice.get("text", ""), choice.get("finish_reason") or why]
    return dict(sorted(found.items()))


class Load:
    """Requests to a server, and what became of them."""

    def __init__(self, trial: Trial, server: Server, pool: list[dict[str, Any]]) -> None:
        self.trial, self.server, self.pool, self.ends = trial, server, pool, Counter[str]()
        self.stopped_at = math.inf
        """When the server got SIGTERM: what is sent later may find no connection."""
        self.may_end = False
        """Whether a stream may end with an error, as after a replica's death."""

    async def send(self, count: int, kinds: dict[str, int], clients: int = CLIENTS) -> None:
        """Send so many requests, by kind and weight."""
        left = iter(self.trial.rng.choices([*kinds], [*kinds.values()], k=count))
        seeds = [self.trial.rng.random() for _ in range(clients)]
        await asyncio.gather(*(self._client(left, random.Random(seed)) for seed in seeds))

    async def _client(self, left: Iterator[str], rng: random.Random) -> None:
        async with _client_of(self.server) as http:
            for kind in left:
                began = time.monotonic()
                try:
                    await {"ask": self.ask, "hang up": self.hang_up, "hostile": self.hostile}[kind](http, rng)
                except httpx.HTTPError as error:
                    is_allowed = began > self.stopped_at and not isinstance(error, httpx.TimeoutException)
                    self.ends["no connection" if is_allowed else f"{kind}: {type(error).__name__}"] += 1
                    if not is_allowed:
                        self.trial.hold(ENDED, False, f"{kind}: {error!r}")

    async def ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Ask for one of the pool, and compare."""
        number, is_stream = rng.randrange(len(self.pool)), rng.random() < 0.5
        answer = await http.post(PATH, json=self.pool[number] | {"stream": is_stream})
        self.ends[f"asked, {answer.status_code}"] += 1
        if answer.status_code == 200:
            found = answer_of(answer.text, is_stream)
            if found is None and self.may_end:
                self.trial.hold(ENDED, '"error"' in answer.text, answer.text[-300:])
                return
            expected = self.server.expected[number]
            self.trial.hold(ALONE, found == expected, f"{self.pool[number]}: {found}, alone {expected}")
        else:
            is_documented = answer.status_code in DOCUMENTED - {400} and "error" in answer.json()
            self.trial.hold(ENDED, is_documented, f"{answer.status_code} {answer.text[:300]}")

    async def hang_up(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Close the connection before the answer, or in the middle of it."""
        body = rng.choice(self.pool) | {"stream": True, "max_tokens": 80, "ignore_eos": True}
        pieces = rng.randrange(3)
        async with http.stream("POST", PATH, json=body) as answer:
            async for _ in answer.aiter_lines():
                if (pieces := pieces - 1) < 0:
                    break
        self.ends["hung up"] += 1

    async def hostile(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Send a body that is none, or a valid one with flipped bits or cut."""
        request: dict[str, Any]
        if rng.random() < 0.3:
            request = rng.choice(MALFORMED)
        elif rng.random() < 0.3:
            request = {"content": rng.choice([body for body, status in HOSTILE.values() if status == 400])}
        else:
            data = bytearray(json.dumps(rng.choice(self.pool)).encode())
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            request = {"content": bytes(data[: rng.randint(1, len(data))])}
        answer = await http.post(PATH, headers=JSON, **request)
        self.ends[f"hostile, {answer.status_code}"] += 1
        if answer.status_code == 200:  # A flipped bit may leave a valid request.
            return
        message = answer.json()["error"]["message"]
        is_right = answer.status_code in DOCUMENTED and "\n" not in message and (answer.status_code != 503)
        self.trial.hold(
            HOSTILES, is_right or time.monotonic() > self.stopped_at, f"{answer.status_code} {answer.text[:300]}"
        )


def _model(trial: Trial) -> Path:
    """A model of one layer, made once a campaign."""
    directory = trial.root / "tiny-1"
    if not directory.exists():
        subprocess.run([sys.executable, "-c", MAKE, str(directory)], check=True)
    return directory


def _start(trial: Trial, *more: str, on: str = "cpu:4", mesh: str = "dp=2,tp=2") -> Server:
    words = ["serve", _model(trial), "--on", on, "--mesh", mesh, "--context", CONTEXT, "--port", 0]
    command = Command([*words, "--max-queue", MAX_QUEUE, *more], trial.folder / "server")
    if not command.wait_for(lambda: "ready on " in command.text):
        command.signal(signal.SIGKILL)
        raise RuntimeError(f"the server did not start:\n{command.text}")
    return Server(command, command.text.split("ready on ")[1].split()[0], {})


def _client_of(server: Server) -> httpx.AsyncClient:
    # Without TLS, whose context takes 50 ms to make.
    return httpx.AsyncClient(base_url=server.url, timeout=240, verify=False)


async def _ask_alone(server: Server, pool: list[dict[str, Any]]) -> None:
    async with _client_of(server) as http:
        for number, body in enumerate(pool):
            server.expected[number] = answer_of((await http.post(PATH, json=body)).text, False)


async def _idle(server: Server) -> dict[str, float]:
    """The engine's numbers once nothing runs."""
    async with _client_of(server) as http:
        until = time.monotonic() + 60
        while True:
            found = numbers(await http.get("/metrics"))
            if not (found["running"] or found["queued"]) or time.monotonic() > until:
                return found
            await asyncio.sleep(0.1)


MIX = {"ask": 80, "hang up": 10, "hostile": 10}


async def _load(trial: Trial, server: Server, load: Load, count: int) -> None:
    """Requests in fifths; memory and pages after each."""
    while (await _idle(server))["uncompiled_programs"]:  # Each takes memory.
        await asyncio.sleep(0.5)
    process, rss = psutil.Process(server.command.pid), []
    for _ in range(5):
        await load.send(count // 5, MIX)
        found = await _idle(server)
        trial.hold(ENDED, not (found["running"] or found["queued"]), found)
        rss.append(process.memory_info().rss)
    if count >= 1000:  # Fewer do not warm it up.
        trial.hold(MEMORY, rss[-1] <= rss[0] * (1 + RSS_GROWTH), [size >> 20 for size in rss])


async def _flood(trial: Trial, server: Server, load: Load, count: int) -> None:
    """All requests at once: over the queue's limit they get 429."""
    for _ in range(max(1, count // 400)):
        await load.send(400, {"ask": 1}, clients=400)
        found = await _idle(server)
        trial.hold(ENDED, not (found["running"] or found["queued"]), found)
    trial.hold(FLOOD, set(load.ends) <= {"asked, 200", "asked, 429"} and load.ends["asked, 200"] > 0, load.ends)


async def _drain(trial: Trial, server: Server, load: Load, count: int) -> None:
    """SIGTERM in the middle of requests."""
    sending = asyncio.ensure_future(load.send(count, MIX))
    while load.ends["asked, 200"] < CLIENTS and not sending.done():
        await asyncio.sleep(0.01)
    await asyncio.sleep(trial.rng.uniform(0.0, 1.0))
    load.stopped_at = time.monotonic()
    server.command.signal(signal.SIGTERM)
    await sending
    code = await asyncio.to_thread(server.command.wait, 60)
    trial.hold(DRAIN, code == 0, f"exit code {code}\n{server.command.text}")


async def _kill_replica(trial: Trial, server: Server, load: Load, count: int) -> None:
    """Kill -9 to one of two replicas in the middle of requests; then both are there again."""
    load.may_end = True
    replicas = [child for child in psutil.Process(server.command.pid).children() if "serve" in child.cmdline()]
    sending = asyncio.ensure_future(load.send(count, {"ask": 90, "hang up": 10}))
    while load.ends["asked, 200"] < CLIENTS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(trial.rng.uniform(0.0, 1.0))
    os.kill(trial.rng.choice(replicas).pid, signal.SIGKILL)
    await sending
    allowed = {"asked, 200", "hung up", "asked, 429"}
    trial.hold(REPLICA, set(load.ends) <= allowed, load.ends)
    async with _client_of(server) as http:
        until, up = time.monotonic() + 120, 0
        while up < 2 and time.monotonic() < until:
            text = (await http.get("/metrics")).text
            up = sum(line.endswith(" 1.0") for line in text.splitlines() if "front_replica_up{" in line)
            await asyncio.sleep(0.2)
        trial.hold(REPLICA, up == 2, f"{up} replicas are up")
    await load.send(count // 5, {"ask": 1})


def serve(trial: Trial, count: int) -> None:
    """A trial: a server, its answers alone, and one kind of trouble with so many requests."""
    trouble: Callable[..., Any] = trial.rng.choice((_load, _load, _flood, _drain, _kill_replica))
    rows = trial.rng.choice((4, 16))
    more = ["--batch", str(rows), *trial.rng.choice(([], ["--no-prefix-cache"], ["--drafts", "3"]))]
    if trouble is not _kill_replica and trial.rng.random() < 0.5:
        more += ["--cache-tokens", str(2 * CONTEXT * 2)]  # So few pages that sequences are preempted.
    trial.do(f"{trouble.__name__.strip('_')}, {' '.join(more)}, {count} requests")
    replicas = ["--replicas", "2"] if trouble is _kill_replica else []
    server = _start(trial, *more, *replicas, mesh="tp=2" if replicas else "dp=2,tp=2")
    pool = bodies(random.Random(trial.seed))

    async def run() -> Load:
        await _ask_alone(server, pool)
        load = Load(trial, server, pool)
        await trouble(trial, server, load, count)
        return load

    try:
        load = asyncio.run(run())
        trial.do(", ".join(f"{number} {what}" for what, number in sorted(load.ends.items())))
        if trouble is not _drain:
            server.command.signal(signal.SIGTERM)
            code = server.command.wait(60)
            trial.hold(DRAIN, code == 0, f"exit code {code}\n{server.command.text}")
    finally:
        server.command.signal(signal.SIGKILL)
        server.command.wait()
    trial.hold(PLAIN, is_plain(server.command.text), server.command.text)
