"""OpenAI's `/v1/completions`: texts after prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from meshwright.serving.http.call import Call, Piece
from meshwright.serving.http.endpoint import Endpoint, Events, Host
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Texts, Tokens
from meshwright.serving.http.generation import Generation, checked_logprobs, engine_request
from meshwright.serving.http.service import Service
from meshwright.serving.http.texts import CompletionLogprobs, CompletionTokens
from meshwright.serving.http.usage import FinishReason, Usage, UsageCount, finish_reason
from meshwright.serving.request import Output, Request, TokenLogprob

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

Prompts = str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]


class CompletionFields(Generation):
    """A request for completions."""

    prompt: Annotated[Prompts, Field(union_mode="left_to_right")] = Field(
        description="a text, a list of tokens, or a list of texts or of lists of tokens"
    )
    max_tokens: int | None = Field(
        None, ge=0, description=f"a whole number from 0, which reads the prompt only; with none, {DEFAULT_MAX_TOKENS}"
    )
    echo: bool = Field(False, description="true or false: whether the prompt is before the text")
    logprobs: int | None = Field(
        None, ge=0, description="a whole number from 0: of how many tokens in each one's place the logprobs are wanted"
    )
    best_of: int | None = Field(None, ge=1, description="as n, or left out: this server does not choose among texts")
    suffix: str | None = Field(None, description="left out: this server does not fill in")


class CompletionChoice(BaseModel):
    """One text of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The texts of a completion, or what is new of them in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


async def complete(host: Host, asked: CompletionFields) -> Completion | Events:
    """Make the texts that follow each prompt."""
    service = host.service
    service.check_model(asked.model)
    _check(asked)
    logprobs = checked_logprobs("logprobs", asked.logprobs)
    prompts = await prompt_tokens(service, asked.prompt, "prompt")
    requests = [
        engine_request(
            asked, service, prompt, max_tokens=asked.max_tokens, usual_tokens=DEFAULT_MAX_TOKENS, logprobs=logprobs,
            prompt_logprobs=logprobs if asked.echo else None,
        )
        for prompt in prompts
    ]  # fmt: skip
    making = _Making(host, asked, requests)
    return making.events() if asked.stream else await making.whole()


def _check(asked: CompletionFields) -> None:
    """Raise where fields are of what this server does not do."""
    if asked.best_of not in (None, asked.n):
        raise ApiError(
            f"best_of is {asked.best_of} and n is {asked.n}; this server returns every text it makes: leave it out",
            param="best_of",
        )
    if asked.suffix:
        raise ApiError("suffix is given; this server fills nothing in before it: leave it out", param="suffix")
    if asked.stream and asked.echo and asked.logprobs is not None and asked.n > 1:
        raise ApiError("a stream with echo and logprobs has n of 1; leave n, stream or one of them out", param="n")


async def prompt_tokens(service: Service, prompt: Any, param: str) -> list[list[int]]:
    """The tokens of each of the `Prompts` of a field.

    Raises:
        ApiError: more prompts than the limit.
    """
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(several) > service.limits.prompts:
        raise ApiError(
            f"{param} has {len(several)} prompts; this server takes at most {service.limits.prompts}", param=param
        )
    return [await service.tokens(one) if isinstance(one, str) else one for one in several]


class _Making:
    """A completion while it is made. Choices are numbered by prompt, then by text."""

    def __init__(self, host: Host, asked: CompletionFields, requests: Sequence[Request]) -> None:
        self._host = host
        self._asked = asked
        self._requests = requests
        self._usage = UsageCount(host.calls.metrics, requests)
        self._begun: dict[int, CompletionTokens] = {}
        """The tokens of each choice that has begun."""
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        """By prompt: they come with its first text."""
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> Completion:
        """The whole completion."""
        async with self._call() as call:
            pieces = await call.whole()
        for piece in pieces:
            self._take(piece)
        return self._completion([self._choice(*piece) for piece in pieces], usage=self._usage.finish())

    async def events(self) -> Events:
        """The completion as it is made."""
        usage = {"usage": None} if self._asked.has_usage else {}
        async with self._call() as call:
            async for pieces in call.pieces():
                events = []
                for piece in pieces:
                    self._take(piece)
                    events.append(self._completion([self._choice(*piece)], **usage))
                yield events
        total = self._usage.finish()
        if self._asked.has_usage:
            yield [self._completion([], usage=total)]

    def _call(self) -> Call:
        return Call(self._host.calls, self._requests, self._host.service.limits, is_streamed=self._asked.stream)

    def _completion(self, choices: list[CompletionChoice], **usage: Usage | None) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._host.service.model,
            choices=choices, **usage,
        )  # fmt: skip

    def _take(self, piece: Piece) -> None:
        self._usage.add(piece)
        if piece.output.prompt_logprobs:
            self._prompt_logprobs[piece.prompt] = piece.output.prompt_logprobs

    def _choice(self, number: int, output: Output) -> CompletionChoice:
        """What an output of a prompt adds to its choice."""
        asked, prompt = self._asked, self._requests[number].prompt
        index = number * asked.n + output.text_number
        is_first = index not in self._begun
        tokens = self._begun.setdefault(index, CompletionTokens(self._host.token_texts))
        text, logprobs = output.text, None
        if is_first and asked.echo:
            text = self._prompt_text(number) + text
        if asked.logprobs is not None and is_first and asked.echo:
            logprobs = tokens.logprobs(prompt[:1], (*self._prompt_logprobs.get(number, ()), *output.logprobs))
        elif asked.logprobs is not None:
            logprobs = tokens.logprobs((), output.logprobs)
        ids: dict[str, Any] = {"token_ids": list(output.tokens)} if asked.return_token_ids else {}
        if is_first and asked.return_token_ids:
            ids["prompt_token_ids"] = list(prompt)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(output.done), **ids
        )

    def _prompt_text(self, number: int) -> str:
        """The text of a prompt, as it was sent."""
        said = self._asked.prompt
        if isinstance(said, str):
            return said
        if isinstance(said[number % len(said)], str):
            return said[number]  # pyright: ignore[reportReturnType]
        tokenizer = self._host.service.tokenizer
        return tokenizer.decode(list(self._requests[number].prompt)) if tokenizer else ""


COMPLETIONS = Endpoint(
    path="/v1/completions",
    what="Texts that follow prompts",
    fields=CompletionFields,
    reply=Completion,
    event=Completion,
    answer=complete,
)
