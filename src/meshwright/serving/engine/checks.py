"""Checks of a request before it is queued."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.serving.engine.request import MOST_LOGPROBS, MOST_STOP_TOKENS, Request


def checked(request: Request, model: LoadedModel, context: int) -> Request:
    """Check a request. Return it with `max_tokens` limited by the context, and without repeated stop tokens.

    context: maximum number of tokens of a sequence, including its prompt.

    Raises:
        MeshwrightError: the request cannot be answered; the message names the valid values.
    """
    vocab = model.config.vocab
    if not len(request.prompt):
        raise MeshwrightError("the prompt has no tokens; give at least one")
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= vocab:
        raise MeshwrightError(
            f"token {low if low < 0 else high} is not one of {model.config.name}, which has 0 to {vocab - 1}"
        )
    if (length := len(request.prompt) + (request.max_tokens > 0)) > context:
        raise MeshwrightError(
            f"the prompt has {length} tokens with the first generated one; a sequence has at most {context}"
        )
    for name, value, most in (
        ("max_tokens", request.max_tokens, None), ("min_tokens", request.min_tokens, request.max_tokens),
        ("logprobs", request.logprobs, MOST_LOGPROBS), ("prompt_logprobs", request.prompt_logprobs, MOST_LOGPROBS),
    ):  # fmt: skip
        if value is not None and (value < 0 or (most is not None and value > most)):
            raise MeshwrightError(f"{name} is {value}; it is 0 {f'to {most}' if most is not None else 'or more'}")
    if request.num_completions < 1:
        raise MeshwrightError(f"num_completions is {request.num_completions}; it is 1 or more")
    if request.stop and model.tokenizer is None:
        raise MeshwrightError(f"{model.config.name} has no tokenizer, so no text can stop it; give stop_tokens")
    stop_tokens = tuple(dict.fromkeys(request.stop_tokens))
    if len(stop_tokens) > MOST_STOP_TOKENS:
        raise MeshwrightError(f"stop_tokens has {len(stop_tokens):,} tokens; it may have at most {MOST_STOP_TOKENS:,}")
    for name, tokens in (("stop_tokens", stop_tokens), ("logit_bias", [token for token, _ in request.logit_bias])):
        if others := [token for token in tokens if not 0 <= token < vocab]:
            raise MeshwrightError(
                f"{name} has token {others[0]}, which is not one of {model.config.name}: it has 0 to {vocab - 1}"
            )
    return replace(request, max_tokens=min(request.max_tokens, context - len(request.prompt)), stop_tokens=stop_tokens)
