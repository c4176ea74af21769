"""OpenAI's `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from meshwright.serving.engine.request import Request, TokenLogprob
from meshwright.serving.http.async_engine import PromptOutput
from meshwright.serving.http.endpoint import AppState, Endpoint, EventBatches
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.generation import GenerationRequest, check_logprobs, engine_request
from meshwright.serving.http.openai.logprobs import CompletionLogprobs, CompletionLogprobsBuilder
from meshwright.serving.http.openai.responses import FinishReason, ResponseBuilder, Usage, finish_reason
from meshwright.serving.http.request_body import Texts, Tokens
from meshwright.serving.http.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens."""

Prompts = str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """The request body of completions."""

    prompt: Annotated[Prompts, Field(union_mode="left_to_right")] = Field(
        description="a text, a list of token ids, or a list of texts or of such lists"
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description=f"a whole number; 0 only processes the prompt; without it, {DEFAULT_MAX_TOKENS}",
    )
    echo: bool = Field(False, description="true or false: whether to return the prompt before the completion")
    logprobs: int | None = Field(
        None, ge=0, lt=2**31, description="a whole number from 0: how many alternatives to return at each position"
    )
    best_of: int | None = Field(
        None, ge=1, lt=2**31, description="equal to n or left out: this server does not select among completions"
    )
    add_special_tokens: bool = Field(
        True, description="true or false: whether prompts of text get the special tokens that begin a text"
    )
    suffix: str | None = Field(None, description="left out: this server does not fill in the middle")


class CompletionChoice(BaseModel):
    """One completion of one prompt, or in a stream its new content."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The response body of completions, or an event of their stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


async def create_completion(state: AppState, body: CompletionRequest) -> BaseModel | EventBatches:
    """Generate the completions of each prompt."""
    service = state.service
    if body.best_of not in (None, body.n):
        raise ApiError(
            f"best_of is {body.best_of} and n is {body.n}; this server returns every completion: leave best_of out",
            param="best_of",
        )
    if body.suffix:
        raise ApiError("suffix is given; this server does not fill in the middle: leave it out", param="suffix")
    if body.stream and body.echo and body.logprobs is not None and body.n > 1:
        raise ApiError("a stream with echo and logprobs must have n of 1; leave one of them out", param="n")
    logprobs = check_logprobs("logprobs", body.logprobs)
    requests = [
        engine_request(
            body, service, prompt, max_tokens=body.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=logprobs,
            prompt_logprobs=logprobs if body.echo else None,
        )
        for prompt in await prompt_tokens(
            service, body.prompt, "prompt", add_special_tokens=body.add_special_tokens,
            is_cut=body.truncate_prompt_tokens is not None,
        )
    ]  # fmt: skip
    return await _CompletionResponse(state, body, requests).respond()


async def prompt_tokens(
    service: Service, prompt: Any, param: str, *, add_special_tokens: bool = True, is_cut: bool = False
) -> list[list[int]]:
    """Return the tokens of each prompt in a field of type `Prompts`.

    Args:
        param: the name of the field, for errors.
        add_special_tokens: whether prompts of text get the special tokens that begin a text.
        is_cut: whether the caller keeps only the end of a prompt that is longer than the context.

    Raises:
        ApiError: there are more prompts than the limit, or a text is too long by its characters.
    """
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    service.check_num_prompts(param, len(prompts))
    length = {"kept" if is_cut else "most": service.context}
    options: dict[str, Any] = {**length, "add_special_tokens": add_special_tokens}
    return [await service.tokens(one, param, **options) if isinstance(one, str) else one for one in prompts]


class _CompletionResponse(ResponseBuilder[CompletionRequest]):
    """Builds the response to one completions request. Choices are numbered by prompt, then by completion."""

    def __init__(self, state: AppState, body: CompletionRequest, requests: Sequence[Request]) -> None:
        super().__init__(state, body, requests, "cmpl")
        self._logprobs_builders: dict[int, CompletionLogprobsBuilder] = {}
        """The builder of each choice that has started."""
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        """Log probabilities of each prompt, which the engine sends with the prompt's first completion."""

    def response(self, parts: Sequence[PromptOutput], **fields: Any) -> Completion:
        return Completion(object="text_completion", choices=[self._choice(part) for part in parts], **fields)

    def chunks(self, part: PromptOutput, **fields: Any) -> list[BaseModel]:
        return [self.response([part], **fields)]

    def usage_chunk(self, **fields: Any) -> Completion:
        return self.response([], **fields)

    def _choice(self, part: PromptOutput) -> CompletionChoice:
        """Return the choice for an output; in a stream, only its new content."""
        body, output, prompt = self.body, part.output, self.requests[part.prompt].prompt
        if output.prompt_logprobs:
            self._prompt_logprobs[part.prompt] = output.prompt_logprobs
        index = part.prompt * body.n + output.completion
        is_first = index not in self._logprobs_builders
        builder = self._logprobs_builders.setdefault(index, CompletionLogprobsBuilder(self.state.token_decoder))
        text, logprobs = output.text, None
        if is_first and body.echo:
            text = self._prompt_text(part.prompt) + text
        if body.logprobs is not None and is_first and body.echo:
            logprobs = builder.logprobs((*self._prompt_logprobs.get(part.prompt, ()), *output.logprobs), prompt[:1])
        elif body.logprobs is not None:
            logprobs = builder.logprobs(output.logprobs)
        ids = self.token_ids(output)
        if is_first and body.return_token_ids:
            ids["prompt_token_ids"] = list(prompt)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(output.done), **ids
        )

    def _prompt_text(self, number: int) -> str:
        """Return the text of a prompt: as the client sent it, or decoded from its token ids."""
        prompts = self.body.prompt
        if isinstance(prompts, str):
            return prompts
        if isinstance(prompts[number % len(prompts)], str):
            return prompts[number]  # pyright: ignore[reportReturnType]
        tokenizer = self.state.service.tokenizer
        return tokenizer.decode(list(self.requests[number].prompt)) if tokenizer else ""


COMPLETIONS = Endpoint(
    path="/v1/completions",
    summary="Completions of prompts",
    request=CompletionRequest,
    response=Completion,
    chunk=Completion,
    handler=create_completion,
)
