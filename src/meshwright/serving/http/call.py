"""The outputs of one HTTP request's prompts, on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

from meshwright.errors import MeshwrightError
from meshwright.serving.http.errors import ApiError, from_engine
from meshwright.serving.http.limits import Limits
from meshwright.serving.http.metrics import Metrics
from meshwright.serving.request import ClosedError, Deliver, Output, OverloadedError, Request, Serves


class Piece(NamedTuple):
    """What a step adds to one text, and the number of its prompt in the request."""

    prompt: int
    output: Output


class Calls:
    """All calls of a server. The engine's thread wakes the event loop once for the outputs of a whole step.

    Args:
        on_closed: called with what an engine says that takes no more requests.
    """

    def __init__(self, engine: Serves, metrics: Metrics, on_closed: Callable[[ClosedError], None]) -> None:
        self.engine = engine
        self.metrics = metrics
        self.on_closed = on_closed
        self.open: set[Call] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[Call] = deque()
        self._is_woken = False

    def enter(self, call: Call) -> None:
        """Take a call whose outputs may arrive."""
        self._loop = asyncio.get_running_loop()
        self.open.add(call)

    def wake(self, call: Call) -> None:
        """Have a call look for its outputs; from any thread."""
        self._arrived.append(call)
        # Unset before `_arrived` is read, so that a call which comes meanwhile is read or wakes the loop again.
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # The loop has ended, and with it whoever waits.
                self._loop.call_soon_threadsafe(self._notify)

    def fail(self, error: ApiError) -> None:
        """End all calls with an error."""
        for call in list(self.open):
            call.fail(error)

    def _notify(self) -> None:
        self._is_woken = False
        while self._arrived:
            self._arrived.popleft().arrived.set()


class Call:
    """The prompts of one HTTP request in the engine; leaving it aborts what has not ended, which frees its pages.

    Args:
        requests: one a prompt. is_streamed: whether outputs are wanted as they are made, or once a prompt has ended.
        limits: how many of the prompts are in the engine at once, and how long it takes at most.
    """

    def __init__(self, calls: Calls, requests: Sequence[Request], limits: Limits, *, is_streamed: bool) -> None:
        self._calls = calls
        self._requests = requests
        self._is_streamed = is_streamed
        self._limits = limits
        self._num_sent = 0
        self._outputs: deque[tuple[int, float, Sequence[Output]]] = deque()
        self._ids: dict[int, str] = {}
        """Of the prompts in the engine."""
        self._open_texts: dict[int, int] = {}
        """How many texts of a prompt have not ended."""
        self._error: ApiError | None = None
        self._times: dict[tuple[int, int], _Times] = {}
        self.arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._calls.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.open.discard(self)
        for request_id in self._ids.values():
            self._calls.engine.abort(request_id)

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self._error = error
        self.arrived.set()

    async def whole(self) -> list[Piece]:
        """All that is made of each text, by prompt and text.

        Raises:
            ApiError: as `pieces`.
        """
        found: dict[tuple[int, int], list[Output]] = {}
        async for pieces in self.pieces():
            for number, output in pieces:
                found.setdefault((number, output.text_number), []).append(output)
        return [Piece(number, _joined(outputs)) for (number, _), outputs in sorted(found.items())]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What has been made since the last time, until every text has ended.

        Raises:
            ApiError: a prompt that the engine does not take, or a text that failed.
        """
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        while self._ids or self._num_sent < len(self._requests):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._send()
                    await self.arrived.wait()
            except TimeoutError:
                raise too_long(self._limits.seconds) from None
            self.arrived.clear()
            if self._error is not None:
                raise self._error
            pieces = []
            while self._outputs:
                number, seconds, outputs = self._outputs.popleft()
                for output in outputs:
                    self._count(number, seconds, output)
                    pieces.append(Piece(number, output))
            if pieces:
                yield pieces

    async def _send(self) -> None:
        """Submit prompts while the engine takes them. The first is refused, others wait where the queue is full."""
        while self._num_sent < len(self._requests) and len(self._ids) < self._limits.prompts_at_once:
            number = self._num_sent
            self._open_texts[number] = self._requests[number].num_texts
            started = time.perf_counter()
            try:
                self._ids[number] = await self._submit(self._requests[number], self._deliver_to(number))
            except OverloadedError as error:
                if not number:
                    raise from_engine(error) from None
                if self._ids:
                    return
                await asyncio.sleep(error.retry_seconds)
                continue
            except MeshwrightError as error:
                if isinstance(error, ClosedError):
                    self._calls.on_closed(error)
                raise from_engine(error) from None
            self._num_sent += 1
            for text in range(self._requests[number].num_texts):
                self._times[number, text] = _Times(started)

    async def _submit(self, request: Request, deliver: Deliver) -> str:
        if request.constraint is None:
            return self._calls.engine.submit(request, deliver)
        # A grammar takes its time to compile, during which others are answered.
        task = asyncio.ensure_future(asyncio.to_thread(self._calls.engine.submit, request, deliver))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._abort_submitted)
            raise

    def _abort_submitted(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._calls.engine.abort(task.result())

    def _deliver_to(self, number: int) -> Deliver:
        def deliver(outputs: Sequence[Output]) -> None:
            self._outputs.append((number, time.perf_counter(), outputs))
            if self._is_streamed or any(output.done for output in outputs):
                self._calls.wake(self)

        return deliver

    def _count(self, number: int, seconds: float, output: Output) -> None:
        """Take note of an output's time, and of texts that end.

        Raises:
            ApiError: the text failed, or was ended by the engine.
        """
        times = self._times[number, output.text_number]
        if output.tokens:
            times.num_tokens += len(output.tokens)
            times.first = times.first or seconds
        if output.done is None:
            return
        if output.done == "failed":
            raise ApiError(f"the engine failed: {output.error or 'it does not say why'}", status=500, code="failed")
        if output.done == "aborted":
            raise ApiError("the engine ended this request before its text was done", status=503, code="aborted")
        self._calls.metrics.observe_text(
            first_seconds=times.first - times.started if times.num_tokens else None,
            token_seconds=(seconds - times.first) / (times.num_tokens - 1) if times.num_tokens > 1 else None,
        )
        self._open_texts[number] -= 1
        if not self._open_texts[number]:
            del self._ids[number]


def too_long(seconds: float) -> ApiError:
    """The error of an answer that was not done within its time limit."""
    # OpenAI's clients would ask again on 408, for what will take as long then.
    return ApiError(
        f"the answer was not done after {seconds:g} s, the limit of this server; ask for fewer tokens",
        status=408, code="timeout", headers={"x-should-retry": "false"},
    )  # fmt: skip


def _joined(outputs: Sequence[Output]) -> Output:
    """All outputs of one text as one."""
    return replace(
        outputs[0],
        tokens=tuple(token for output in outputs for token in output.tokens),
        text="".join(output.text for output in outputs),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        done=outputs[-1].done,
        stop=outputs[-1].stop,
    )


class _Times:
    """When a text's request was submitted and its first token came, in seconds, and its tokens so far."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.first = 0.0
        self.num_tokens = 0
