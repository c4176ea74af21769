"""What every endpoint needs: the engine, the tokenizer, the model's name, limits, and whether requests are taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.serving.decode_stats import StepMeans
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.limits import Limits
from meshwright.serving.request import Serves
from meshwright.serving.stats import Stats
from meshwright.text import Tokenizer

LONG_TEXT = 16_384
"""Characters from which a text is tokenized beside the event loop: shorter ones take less than a few milliseconds."""


@dataclass(kw_only=True)
class ServerState:
    """Whom a server lets in, and whether it takes requests.

    Args:
        api_keys: of which a request has one; with none, all requests are answered.
        cors_origins: pages of these origins may call; "*" for all.
        is_ready: whether requests are taken. is_draining: whether the server is shutting down.
        failure: what ended it. on_stop: ends the server; set by it as it begins.
        num_active: requests that have been let in and are not answered yet.
    """

    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    is_ready: bool = False
    is_draining: bool = False
    num_active: int = 0
    failure: Exception | None = None
    on_stop: Callable[[], None] = lambda: None

    def fail(self, error: Exception) -> None:
        """End the server with an error, as an engine does that cannot go on; from any thread."""
        self.failure = self.failure or error
        self.is_ready = False
        self.on_stop()


@dataclass(kw_only=True)
class Service(ServerState):
    """An engine and what its HTTP says of it.

    Args:
        model: the name clients call it by. tokenizer: None for a model that takes and makes tokens only.
        context: the most tokens of a prompt and its text together.
        stats: the engine's numbers for `/metrics`. means: those measured and those planned, likewise.
    """

    engine: Serves
    model: str
    context: int
    tokenizer: Tokenizer | None = None
    stats: Callable[[], Stats] | None = None
    means: Callable[[], tuple[StepMeans, StepMeans] | None] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text of this model."""
        return self.tokenizer.stop_tokens if self.tokenizer else ()

    def needs_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: there is none, which `what` needs.
        """
        if self.tokenizer is None:
            raise ApiError(f"{self.model} has no tokenizer, which {what}; give the prompt as tokens")
        return self.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise where a request is for another model."""
        if name is not None and name != self.model:
            message = f"there is no model {name[:100]!r} here; it is {self.model!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        tokenizer = self.needs_tokenizer("reads text")
        if len(text) <= LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
