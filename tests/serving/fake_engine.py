"""An engine for tests of HTTP: tokens from a table, made by a thread, one a step for every text."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from dataclasses import dataclass, field

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import Tokenizer, TokenStream
from meshwright.serving.engine.request import (
    ClosedError,
    Output,
    OutputCallback,
    OverloadedError,
    Request,
    TokenLogprob,
)
from meshwright.serving.engine.stats import Stats

ANSWER = "Grüße, world! 東京 is a city. "


@dataclass
class Running:
    """A request and what was made of it."""

    request: Request
    deliver: OutputCallback
    streams: list[TokenStream | None]
    made: list[list[int]]
    texts: list[str]
    shown: list[int]
    open: set[int]
    is_begun: bool = False


@dataclass
class FakeEngine:
    """Each text is `ANSWER` over and over, begun at the prompt's last token plus the seed where it is sampled.

    Args:
        queue: the most requests at once. step_seconds: between tokens. fails_after: steps of a request until it fails.
    """

    tokenizer: Tokenizer | None
    vocab: int = 256
    queue: int = 64
    step_seconds: float = 0.0
    fails_after: int | None = None
    running: dict[str, Running] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    is_closed: bool = False
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._ids = itertools.count()
        self._lock = threading.Condition()
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, request: Request, deliver: OutputCallback) -> str:
        with self._lock:
            if self.is_closed:
                raise ClosedError("the engine is closed")
            if len(self.running) >= self.queue:
                raise OverloadedError(f"{self.queue} requests wait; ask again later", retry_seconds=0.05)
            if bad := [token for token in request.prompt if token >= self.vocab]:
                raise MeshwrightError(f"token {bad[0]} is not one of fake, which has 0 to {self.vocab - 1}")
            self.requests.append(request)
            number, texts = f"r{next(self._ids)}", request.num_completions
            self.running[number] = Running(
                request,
                deliver,
                [self.tokenizer and TokenStream(self.tokenizer) for _ in range(texts)],
                [[] for _ in range(texts)],
                [""] * texts,
                [0] * texts,
                set(range(texts)),
            )
            self._lock.notify()
            return number

    def abort(self, request_id: str) -> None:
        with self._lock:
            if self.running.pop(request_id, None):
                self.aborted.append(request_id)

    def stats(self) -> Stats:
        return Stats(running=len(self.running), num_pages=100, used_pages=len(self.running), num_steps=self.num_tokens)

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self.running:
                    self._lock.wait()
                for number, running in list(self.running.items()):
                    outputs = [self._step(running, text) for text in sorted(running.open)]
                    running.is_begun = True
                    if not running.open:
                        del self.running[number]
                    running.deliver(outputs)
            time.sleep(self.step_seconds)

    def _step(self, running: Running, text: int) -> Output:
        request, made = running.request, running.made[text]
        first = {}
        if not running.is_begun:
            first["cached_tokens"] = len(request.prompt) // 2
            if text == 0 and request.prompt_logprobs is not None:
                first["prompt_logprobs"] = tuple(
                    token_logprob(before, token, request.prompt_logprobs)
                    for before, token in itertools.pairwise(request.prompt)
                )
            if text == 0 and request.pooled:
                first["pooled"] = tuple(math.sin(sum(request.prompt) + n) for n in range(8))
        if self.fails_after is not None and len(made) >= self.fails_after:
            running.open.discard(text)
            return Output(completion=text, done="failed", error="the table is broken", **first)
        if not request.max_tokens:
            running.open.discard(text)
            return Output(completion=text, done="length", **first)
        before = made[-1] if made else request.prompt[-1]
        token = self.next_token(request, text, len(made))
        self.num_tokens += 1
        done = None
        if token in request.stop_tokens and len(made) >= request.min_tokens:
            new, done, stream = (), "token", running.streams[text]
            running.texts[text] += stream.finish() if stream else ""
        else:
            new = (token,)
            made.append(token)
            stream = running.streams[text]
            running.texts[text] += stream.add(token) if stream else ""
            if len(made) == request.max_tokens:
                done = "length"
                running.texts[text] += stream.finish() if stream else ""
        whole, stop = running.texts[text], None
        if found := [(at, end) for end in request.stop if (at := whole.find(end)) >= 0]:
            at, stop = min(found)
            whole, done = whole[:at], "text"
        held = (
            0
            if done
            else max((n for end in request.stop for n in range(len(end)) if whole.endswith(end[:n])), default=0)
        )
        until = len(whole) - held
        piece, running.shown[text] = whole[running.shown[text] : until], max(until, running.shown[text])
        if done:
            running.open.discard(text)
        logprobs = (token_logprob(before, token, request.logprobs),) if new and request.logprobs is not None else ()
        return Output(completion=text, tokens=new, text=piece, logprobs=logprobs, done=done, stop=stop, **first)

    def next_token(self, request: Request, text: int, step: int) -> int:
        """The token of a text at a step."""
        answer = ANSWER.encode()
        start = (request.sampling.seed + text) if request.sampling.temperature else 0
        return answer[(start + step) % len(answer)]


def token_logprob(before: int, token: int, likeliest: int) -> TokenLogprob:
    """A token's log probability after another, from a table of hashes; `before + 1` is the likeliest of all."""

    def logprob(token: int) -> float:
        if token == (before + 1) % 256:
            return -0.25
        return -1.0 - hashlib.sha256(bytes([before % 256, token % 256])).digest()[0] / 32

    others = sorted(range(256), key=lambda other: (-logprob(other), other))[:likeliest]
    return TokenLogprob(token, logprob(token), tuple((other, logprob(other)) for other in others))
