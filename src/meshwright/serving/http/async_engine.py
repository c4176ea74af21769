"""An asyncio wrapper of the engine: passes outputs from the engine's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

from meshwright.errors import MeshwrightError
from meshwright.serving.engine.request import (
    ClosedError,
    EngineClient,
    Output,
    OutputCallback,
    OverloadedError,
    Request,
)
from meshwright.serving.http.errors import ApiError, from_engine_error
from meshwright.serving.http.metrics import Metrics
from meshwright.serving.http.service import Service

THREADS = 64
"""Number of threads that wait for constraints to compile."""


class PromptOutput(NamedTuple):
    """An output of the engine, with the index of its prompt in the HTTP request."""

    prompt: int
    output: Output


class AsyncEngine:
    """An engine and its open output streams. The engine's thread wakes the event loop once per step, not per output.

    Args:
        engine: the engine, whose thread delivers outputs.
        metrics: the server's metrics.
        on_closed: called with the error when the engine accepts no more requests.
    """

    def __init__(self, engine: EngineClient, metrics: Metrics, on_closed: Callable[[ClosedError], None]) -> None:
        self.engine = engine
        self.metrics = metrics
        self.on_closed = on_closed
        self._threads = ThreadPoolExecutor(THREADS, "constraints")
        self._compiling = WeakValueDictionary[str, asyncio.Semaphore]()
        """For each owner (client) whose constraints are being compiled, a semaphore that limits the owner's threads."""
        self._streams: set[OutputStream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_notify: deque[OutputStream] = deque()
        self._is_notify_scheduled = False

    async def submit_in_thread(self, request: Request, deliver: OutputCallback) -> str:
        """Submit a request in a thread, because its constraint takes long to compile. Each owner has a few threads."""
        turns = self._compiling.setdefault(request.owner, asyncio.Semaphore(THREADS // 4))
        async with turns:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self.engine.submit, request, deliver)

    def add(self, stream: OutputStream) -> None:
        """Register a stream; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._streams.add(stream)

    def remove(self, stream: OutputStream) -> None:
        """Forget a stream."""
        self._streams.discard(stream)

    def notify(self, stream: OutputStream) -> None:
        """Wake the coroutine that reads a stream. Thread-safe."""
        self._to_notify.append(stream)
        # `_notify_all` clears the flag before it reads the queue, so a stream added meanwhile is not missed.
        if not self._is_notify_scheduled and self._loop is not None:
            self._is_notify_scheduled = True
            with contextlib.suppress(RuntimeError):  # The loop is closed, and nothing waits on it.
                self._loop.call_soon_threadsafe(self._notify_all)

    def fail(self, error: ApiError) -> None:
        """End all open streams with an error."""
        for stream in list(self._streams):
            stream.fail(error)

    def _notify_all(self) -> None:
        self._is_notify_scheduled = False
        while self._to_notify:
            self._to_notify.popleft().has_news.set()


class OutputStream:
    """The outputs of the prompts of one HTTP request. An async context manager: on exit it aborts unfinished prompts.

    Args:
        async_engine: the engine to submit to.
        requests: the engine's requests, one per prompt.
        service: the server, with the client, the adapter and the limits of the HTTP request.
        is_streamed: whether to wake the reader at every output; if not, only when a completion ends.

    Raises:
        ApiError: the completions may have more tokens together than the limit.
    """

    def __init__(
        self, async_engine: AsyncEngine, requests: Sequence[Request], service: Service, *, is_streamed: bool
    ) -> None:
        limits = service.limits
        total = sum(request.num_completions * request.max_tokens for request in requests)
        if total > limits.total_tokens:
            raise ApiError(
                f"prompts x n x max_tokens is {total:,} tokens; this server makes at most {limits.total_tokens:,}"
            )
        self._async_engine = async_engine
        group = secrets.token_hex(8)
        self._requests = [
            replace(
                request,
                owner=service.api_key or service.client,
                group=group,
                # Only requests with the same key and the same salt share prefixes.
                cache_salt=json.dumps([service.api_key, request.cache_salt]),
                adapter=service.adapter,
            )
            for request in requests
        ]
        self._is_streamed = is_streamed
        self._limits = limits
        self._num_submitted = 0
        self._outputs: deque[tuple[int, float, Sequence[Output]]] = deque()
        """Outputs not read yet: (index of the prompt, time of arrival, outputs)."""
        self._request_ids: dict[int, str] = {}
        """Engine ids of the unfinished prompts, by index of the prompt."""
        self._num_unfinished: dict[int, int] = {}
        """Number of unfinished completions of each submitted prompt, by index of the prompt."""
        self._timings: dict[tuple[int, int], _Timing] = {}
        """Times of each completion, by (index of the prompt, index of the completion)."""
        self._error: ApiError | None = None
        self.has_news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._async_engine.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._async_engine.remove(self)
        for request_id in self._request_ids.values():
            self._async_engine.engine.abort(request_id)

    def fail(self, error: ApiError) -> None:
        """End the stream with an error."""
        self._error = error
        self.has_news.set()

    async def collect(self) -> list[PromptOutput]:
        """Wait for all completions; return one output for each, ordered by prompt and completion.

        Raises:
            ApiError: as in `batches`.
        """
        collected: dict[tuple[int, int], list[Output]] = {}
        async for batch in self.batches():
            for prompt, output in batch:
                collected.setdefault((prompt, output.completion), []).append(output)
        return [PromptOutput(prompt, _joined(outputs)) for (prompt, _), outputs in sorted(collected.items())]

    async def batches(self) -> AsyncIterator[list[PromptOutput]]:
        """Yield new outputs, in batches, until every completion has ended.

        Raises:
            ApiError: the engine rejects a prompt, a completion failed, or the time limit was reached.
        """
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        while self._request_ids or self._num_submitted < len(self._requests):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._submit_prompts()
                    await self.has_news.wait()
            except TimeoutError:
                raise answer_timeout(self._limits.seconds) from None
            self.has_news.clear()
            if self._error is not None:
                raise self._error
            batch = []
            while self._outputs:
                prompt, seconds, outputs = self._outputs.popleft()
                for output in outputs:
                    self._observe(prompt, seconds, output)
                    batch.append(PromptOutput(prompt, output))
            if batch:
                yield batch

    async def _submit_prompts(self) -> None:
        """Submit prompts up to the limit. If the queue is full, the first prompt raises an error; later ones wait."""
        while self._num_submitted < len(self._requests) and self._has_room():
            prompt = self._num_submitted
            self._num_unfinished[prompt] = self._requests[prompt].num_completions
            submit_seconds = time.perf_counter()
            try:
                self._request_ids[prompt] = await self._submit(self._requests[prompt], self._deliver_to(prompt))
            except OverloadedError as error:
                if not prompt:
                    raise from_engine_error(error) from None
                if self._request_ids:
                    return
                await asyncio.sleep(error.retry_seconds)
                continue
            except MeshwrightError as error:
                if isinstance(error, ClosedError):
                    self._async_engine.on_closed(error)
                raise from_engine_error(error) from None
            self._num_submitted += 1
            for completion in range(self._requests[prompt].num_completions):
                self._timings[prompt, completion] = _Timing(submit_seconds)

    def _has_room(self) -> bool:
        """Whether the next prompt may be submitted while the current ones are in the engine."""
        held = sum(self._num_unfinished[prompt] for prompt in self._request_ids)
        wanted = held + self._requests[self._num_submitted].num_completions
        return not held or wanted <= self._limits.prompts_at_once

    async def _submit(self, request: Request, deliver: OutputCallback) -> str:
        if request.constraint is None:
            return self._async_engine.engine.submit(request, deliver)
        # Compiling a grammar takes long: do it in a thread, so that the event loop is not blocked.
        task = asyncio.ensure_future(self._async_engine.submit_in_thread(request, deliver))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._abort_submitted)
            raise

    def _abort_submitted(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._async_engine.engine.abort(task.result())

    def _deliver_to(self, prompt: int) -> OutputCallback:
        def deliver(outputs: Sequence[Output]) -> None:
            self._outputs.append((prompt, time.perf_counter(), outputs))
            if self._is_streamed or any(output.done for output in outputs):
                self._async_engine.notify(self)

        return deliver

    def _observe(self, prompt: int, seconds: float, output: Output) -> None:
        """Record an output that arrived at `seconds` (`time.perf_counter`), and the end of its completion.

        Raises:
            ApiError: the completion failed, or the engine aborted it.
        """
        timing = self._timings[prompt, output.completion]
        if output.tokens:
            timing.num_tokens += len(output.tokens)
            timing.first_token_seconds = timing.first_token_seconds or seconds
        if output.done is None:
            return
        if output.done == "failed":
            raise ApiError(f"the engine failed: {output.error or 'no reason given'}", status=500, code="failed")
        if output.done == "refused":
            raise ApiError(output.error)
        if output.done == "aborted":
            raise ApiError("the engine aborted this request before it was finished", status=503, code="aborted")
        first = timing.first_token_seconds
        self._async_engine.metrics.observe_completion(
            first_token_seconds=first - timing.submit_seconds if timing.num_tokens else None,
            token_seconds=(seconds - first) / (timing.num_tokens - 1) if timing.num_tokens > 1 else None,
        )
        self._num_unfinished[prompt] -= 1
        if not self._num_unfinished[prompt]:
            del self._request_ids[prompt]


def answer_timeout(seconds: float) -> ApiError:
    """Return the error for an answer that was not complete within its time limit."""
    # OpenAI's clients would retry a 408 and take as long again: the header tells them not to.
    return ApiError(
        f"the answer was not complete after {seconds:g} s, the limit of this server; request fewer tokens",
        status=408, code="timeout", headers={"x-should-retry": "false"},
    )  # fmt: skip


def _joined(outputs: Sequence[Output]) -> Output:
    """Return one output with the tokens, text and log probabilities of all outputs of a completion."""
    return replace(
        outputs[0],
        tokens=tuple(token for output in outputs for token in output.tokens),
        text="".join(output.text for output in outputs),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        done=outputs[-1].done,
        stop=outputs[-1].stop,
    )


@dataclass
class _Timing:
    """Times of a completion on the clock `time.perf_counter`, and its number of tokens so far."""

    submit_seconds: float
    first_token_seconds: float = 0.0
    num_tokens: int = 0
