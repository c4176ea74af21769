"""The state of a server that its endpoints read: limits, API keys, readiness, the engine and its tokenizer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.serving.engine.decode_stats import StepMeans
from meshwright.serving.engine.request import Adapter, EngineClient
from meshwright.serving.engine.stats import Stats
from meshwright.serving.http.adapters import ServedAdapters
from meshwright.serving.http.errors import ApiError
from meshwright.support.field_types import check_fields

T = TypeVar("T")

LONG_BODY = 4096
"""Bodies of more bytes are parsed and tokenized in a thread; shorter ones take a millisecond on the event loop."""

WORKERS = ThreadPoolExecutor(4, "tokenizing")
"""Threads for long bodies; only a few, because most of their work holds Python's global lock."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Maximum values of one HTTP request. (The engine limits its queue.)

    Args:
        requests: requests to the model answered at once for one API key, or for all clients of a server without keys;
            None for no limit.
        body_bytes: size of the body.
        body_fields: number of fields of all JSON objects in the body.
        body_values: number of items of all JSON lists in the body, plus fields.
        body_seconds: time until the body has arrived.
        head_bytes: size of the request line and headers.
        head_seconds: time until the headers have arrived.
        seconds: time until the answer is complete.
        unread_seconds: time in which the client reads nothing of its answer.
        prompts: prompts in one request.
        prompts_at_once: completions of one request that are in the engine at the same time.
        prompt_tokens: tokens of each prompt; None for the model's context.
        choices: completions per prompt (`n`).
        max_tokens: tokens of each completion; None for the rest of the model's context.
        total_tokens: tokens of all completions: prompts x choices x max_tokens.
        stop_tokens: stop tokens in one request.
        stop_strings: stop strings in one request.
        stop_characters: length of a stop string.
    """

    requests: int | None = None
    body_bytes: int = 4 << 20
    body_fields: int = 20_000
    body_values: int = 600_000
    body_seconds: float = 30.0
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    seconds: float = 600.0
    unread_seconds: float = 60.0
    prompts: int = 1024
    prompts_at_once: int = 128
    prompt_tokens: int | None = None
    choices: int = 16
    max_tokens: int | None = None
    total_tokens: int = 1 << 22
    stop_tokens: int = 512
    stop_strings: int = 16
    stop_characters: int = 256

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise MeshwrightError(f"the limit {name} is {value}; it must be a number above 0")


@dataclass(frozen=True)
class ApiKey:
    """An API key. limits: the limits of its requests; None for the server's."""

    key: str
    limits: RequestLimits | None = None


@dataclass(kw_only=True)
class ServerState:
    """Access control and state of a server, read by its middleware. A proxy in front of replicas has one too.

    Args:
        limits: limits of a request whose API key has none of its own.
        api_keys: valid keys; a request must have one of them. Empty to answer all requests.
        cors_origins: origins whose pages may call the server (CORS); "*" for all.
        allowed_hosts: host names that a request's Host header may have besides localhost and `host`; "*" for all.
        host: the host or address that the server listens on; set by `HttpServer`.
        is_ready: whether requests are accepted.
        is_draining: whether the server is shutting down.
        num_active: accepted requests that have no complete answer yet.
        failure: the error that ended the server; None if none did.
        on_stop: shuts the server down; set by `HttpServer`.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    api_keys: tuple[ApiKey, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    is_ready: bool = False
    is_draining: bool = False
    num_active: int = 0
    failure: Exception | None = None
    on_stop: Callable[[], None] = lambda: None

    def fail(self, error: Exception) -> None:
        """Shut the server down because of an error from which the engine cannot recover. Thread-safe."""
        self.failure = self.failure or error
        self.is_ready = False
        self.on_stop()


@dataclass(kw_only=True)
class Service(ServerState):
    """A server of one engine.

    Args:
        engine: the engine that answers requests.
        model: the name of the model in requests and responses.
        context: maximum number of tokens of a prompt and its completion together.
        tokenizer: the model's tokenizer; None if prompts and completions are token ids only.
        stats: returns the engine's counters, for `/metrics`.
        means: returns measured and predicted means of the decode step, for `/metrics`.
        adapters: the named adapters; None for an engine without any.
        created: time of the start, in seconds since 1970.
        adapter: the adapter of the request being answered; None for the model alone.
        api_key, client, body_size: API key, client address and bytes of the body of the request being answered.
    """

    engine: EngineClient
    model: str
    context: int
    tokenizer: Tokenizer | None = None
    stats: Callable[[], Stats] | None = None
    means: Callable[[], tuple[StepMeans, StepMeans] | None] | None = None
    adapters: ServedAdapters | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    adapter: Adapter | None = None
    api_key: str = ""
    client: str = ""
    body_size: int = 0

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens."""
        return self.tokenizer.stop_tokens if self.tokenizer else ()

    def require_tokenizer(self, purpose: str) -> Tokenizer:
        """Return the tokenizer. purpose: what needs it, for the error message.

        Raises:
            ApiError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(f"{self.model} has no tokenizer, and {purpose} needs one; give the prompt as token ids")
        return self.tokenizer

    @property
    def adapters_by_name(self) -> Mapping[str, Adapter]:
        """The loaded adapters, by name."""
        return self.adapters.by_name if self.adapters else {}

    def find_adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter that a request names, as NAME or MODEL:NAME; None for the model alone.

        Raises:
            ApiError: there is no model and no adapter of this name (status 404).
        """
        if name is None or name == self.model:
            return None
        by_name = self.adapters_by_name
        if (found := by_name.get(name) or by_name.get(name.removeprefix(f"{self.model}:"))) is not None:
            return found
        others = f" with the adapters {', '.join(map(repr, by_name))}" if by_name else ""
        message = f"there is no model {name[:100]!r} on this server; its model is {self.model!r}{others}"
        raise ApiError(message, status=404, param="model", code="model_not_found")

    def check_num_prompts(self, param: str, count: int) -> None:
        """Raise an `ApiError` if the field `param` of a request has more prompts (`count`) than the limit."""
        if count > self.limits.prompts:
            raise ApiError(
                f"{param} has {count} prompts; this server accepts at most {self.limits.prompts}", param=param
            )

    def check_num_tokens(self, param: str, count: int) -> None:
        """Raise an `ApiError` if a text in the field `param` has more tokens (`count`) than the limit."""
        limit = self.limits.prompt_tokens
        if limit is not None and count > limit:
            raise ApiError(
                f"the number of tokens of {param} is {count}; this server accepts at most {limit}", param=param
            )

    async def tokens(
        self,
        text: str,
        param: str,
        *,
        most: int | None = None,
        kept: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the tokens of a text in the field `param`.

        Args:
            text: the text.
            param: the field, for errors.
            most: maximum number of tokens. A text with far too many characters is refused without tokenizing it. None
                if the caller cuts or splits the text.
            kept: number of tokens at the end that the caller uses; earlier ones may be left out. None for all.
            add_special_tokens: whether to add the tokenizer's special tokens at the beginning.

        Raises:
            ApiError: the text is too long by its characters, or the model has no tokenizer.
        """
        tokenizer = self.require_tokenizer("a prompt of text")
        self.check_num_characters(param, text, most)
        return await self.run(partial(tokenizer.encode, self.end(text, kept), add_special_tokens=add_special_tokens))

    def end(self, text: str, num_tokens: int | None) -> str:
        """Return an end of a text that has at least `num_tokens` tokens; the whole text for None.

        The text is not tokenized. `LONG_BODY` more characters are kept, because tokens at the cut may differ from those
        of the whole text.
        """
        each = self.tokenizer.most_characters if self.tokenizer else None
        return text if each is None or num_tokens is None else text[-each * num_tokens - LONG_BODY :]

    def check_num_characters(self, param: str, text: str, most: int | None) -> None:
        """Raise an `ApiError` if a text has so many characters that it has more than `most` tokens (None: no limit)."""
        each = self.tokenizer.most_characters if self.tokenizer else None
        limits = [limit for limit in (most, self.limits.prompt_tokens) if limit is not None]
        # A short text is tokenized, so that the error can report its number of tokens.
        if each is not None and limits and len(text) > max(LONG_BODY, each * min(limits)):
            raise ApiError(
                f"{param} has {len(text):,} characters, which are at least {-(-len(text) // each):,} tokens; it may"
                f" have {min(limits):,}",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function whose time grows with the size of the body, in a thread if the body is long."""
        if self.body_size <= LONG_BODY:
            return function()
        return await asyncio.get_running_loop().run_in_executor(WORKERS, function)
