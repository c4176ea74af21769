"""Shared code of completions and chat completions: usage, finish reasons, and building responses."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from meshwright.serving.engine.request import Ending, Output, Request
from meshwright.serving.http.async_engine import OutputStream, PromptOutput
from meshwright.serving.http.endpoint import AppState, EventBatches
from meshwright.serving.http.metrics import Metrics
from meshwright.serving.http.openai.generation import GenerationRequest

FinishReason = Literal["stop", "length"]


def finish_reason(done: Ending | None) -> FinishReason | None:
    """Return OpenAI's finish reason of an output; None while the completion continues."""
    return None if done is None else "length" if done == "length" else "stop"


class PromptTokensDetails(BaseModel):
    """Prompt tokens that were in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Counts the tokens of a response while it is generated."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._cached_tokens: dict[int, int] = {}
        """Cached tokens by index of the prompt, the maximum over its completions."""
        self._completion_tokens = 0

    def add(self, part: PromptOutput) -> None:
        """Count an output."""
        self._completion_tokens += len(part.output.tokens)
        self._cached_tokens[part.prompt] = max(self._cached_tokens.get(part.prompt, 0), part.output.cached_tokens)

    def finish(self) -> Usage:
        """Return the counts of a complete response, and add them to the metrics."""
        self._metrics.prompt_tokens.inc(self._prompt_tokens)
        self._metrics.completion_tokens.inc(self._completion_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens.values())),
        )


R = TypeVar("R", bound=GenerationRequest)


class ResponseBuilder(ABC, Generic[R]):
    """Builds the response to one HTTP request from the engine's outputs, whole or as a stream of chunks.

    Args:
        state: the app's state.
        body: the HTTP request's body.
        requests: the engine's requests, one per prompt.
        id_prefix: the beginning of the response's id.
    """

    def __init__(self, state: AppState, body: R, requests: Sequence[Request], id_prefix: str) -> None:
        self.state = state
        self.body = body
        self.requests = requests
        self._usage = UsageCounter(state.async_engine.metrics, requests)
        self._header = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": state.service.model
        }  # fmt: skip

    async def respond(self) -> BaseModel | EventBatches:
        """Return the whole response, or its events if the request streams."""
        return self._events() if self.body.stream else await self._whole()

    @abstractmethod
    def response(self, parts: Sequence[PromptOutput], **fields: Any) -> BaseModel:
        """Return the response. parts: one complete output for each completion. fields: id, created, model, usage."""

    @abstractmethod
    def chunks(self, part: PromptOutput, **fields: Any) -> list[BaseModel]:
        """Return the chunks for a new output. fields: id, created, model and usage."""

    @abstractmethod
    def usage_chunk(self, **fields: Any) -> BaseModel:
        """Return the last chunk of a stream with usage, which has no choices. fields: id, created, model and usage."""

    def token_ids(self, output: Output) -> dict[str, Any]:
        """Return vLLM's field `token_ids` of a choice as {name: value}; {} if the request does not ask for it."""
        return {"token_ids": list(output.tokens)} if self.body.return_token_ids else {}

    async def _whole(self) -> BaseModel:
        async with self._stream() as stream:
            parts = await stream.collect()
        parts = [self._with_stop(part) for part in parts]
        for part in parts:
            self._usage.add(part)
        return self.response(parts, **self._header, usage=self._usage.finish())

    async def _events(self) -> EventBatches:
        # With include_usage every chunk has a usage field, which is null in all but the last.
        fields = self._header | ({"usage": None} if self.body.has_usage else {})
        async with self._stream() as stream:
            async for outputs in stream.batches():
                batch = [self._with_stop(part) for part in outputs]
                for part in batch:
                    self._usage.add(part)
                yield [chunk for part in batch for chunk in self.chunks(part, **fields)]
        usage = self._usage.finish()
        if self.body.has_usage:
            yield [self.usage_chunk(**self._header, usage=usage)]

    def _with_stop(self, part: PromptOutput) -> PromptOutput:
        """Return an output; with include_stop_str_in_output, its text includes the stop string that ended it."""
        output = part.output
        if output.stop is None or not self.body.include_stop_str_in_output:
            return part
        return part._replace(output=replace(output, text=output.text + output.stop))

    def _stream(self) -> OutputStream:
        service = self.state.service
        return OutputStream(self.state.async_engine, self.requests, service, is_streamed=self.body.stream)
