"""How many tokens an answer took, and why its texts ended, as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from meshwright.serving.http.call import Piece
from meshwright.serving.http.metrics import Metrics
from meshwright.serving.request import Ending, Request

FinishReason = Literal["stop", "length"]


def finish_reason(done: Ending | None) -> FinishReason | None:
    """Why a text ends; None where more follows."""
    return None if done is None else "length" if done == "length" else "stop"


class PromptTokensDetails(BaseModel):
    """Of the prompts' tokens, those that the prefix cache had."""

    cached_tokens: int


class Usage(BaseModel):
    """The numbers of tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCount:
    """The tokens of an answer while it is made."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._prompt = sum(len(request.prompt) for request in requests)
        self._cached: dict[int, int] = {}
        """By prompt: its texts share it."""
        self._made = 0

    def add(self, piece: Piece) -> None:
        """Count what a step added to one text."""
        self._made += len(piece.output.tokens)
        self._cached[piece.prompt] = max(self._cached.get(piece.prompt, 0), piece.output.cached_tokens)

    def finish(self) -> Usage:
        """The numbers, once the answer is done."""
        self._metrics.prompt_tokens.inc(self._prompt)
        self._metrics.text_tokens.inc(self._made)
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._made,
            total_tokens=self._prompt + self._made,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
