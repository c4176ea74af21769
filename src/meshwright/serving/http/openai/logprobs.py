"""Log probabilities of tokens in the two formats of OpenAI's API: completions and chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from pydantic import BaseModel

from meshwright.execution.text.tokenizer import REPLACEMENT, Tokenizer, TokenStream
from meshwright.serving.engine.request import TokenLogprob

ANCHOR = "a"
"""Text decoded before a single token, because a tokenizer may drop the space at the beginning of a text."""


class TokenDecoder:
    """Decodes single tokens to text, with a cache. A special token, which has no text, becomes its vocabulary entry.

    Args:
        tokenizer: the model's tokenizer; None to write tokens as `token_id:42`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, str] = {}

    def decode(self, token: int) -> str:
        """Return the text of a token; bytes of an incomplete character become the replacement character."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        if token not in self._cache:
            anchor = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
            text = self.tokenizer.decode([*anchor, token]).removeprefix(self.tokenizer.decode(anchor))
            self._cache[token] = text or self._names.get(token, "")
        return self._cache[token]

    @cached_property
    def _names(self) -> dict[int, str]:
        vocabulary = self.tokenizer.codec.vocabulary() if self.tokenizer else {}
        return {number: name for name, number in vocabulary.items()}


class CompletionLogprobs(BaseModel):
    """The log probabilities of a completion: lists with one entry per token.

    Args:
        tokens: the token's text.
        token_logprobs: the token's log probability; None for the first token of a prompt, which follows nothing.
        top_logprobs: log probabilities of the likeliest tokens and of the token itself, by text; None for the first
            token of a prompt.
        text_offset: where the token begins in the text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionLogprobsBuilder:
    """Builds the log probabilities of one completion in several parts, with text offsets from its beginning."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._stream = TokenStream(decoder.tokenizer) if decoder.tokenizer else None
        self._offset = 0

    def logprobs(self, tokens: Iterable[TokenLogprob], unscored: Sequence[int] = ()) -> CompletionLogprobs:
        """Return the log probabilities of the next tokens: None for each of `unscored`, then those of `tokens`."""
        part = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in unscored:
            self._add(part, token)
            part.token_logprobs.append(None)
            part.top_logprobs.append(None)
        for token, logprob, likeliest in tokens:
            self._add(part, token)
            part.token_logprobs.append(logprob)
            top: dict[str, float] = {}
            # Tokens may have the same text (parts of a character): keep the likeliest, which is the first.
            for other, value in (*likeliest, (token, logprob)):
                top.setdefault(self._decoder.decode(other), value)
            part.top_logprobs.append(top)
        return part

    def _add(self, part: CompletionLogprobs, token: int) -> None:
        part.tokens.append(self._decoder.decode(token))
        part.text_offset.append(self._offset)
        self._offset += len(self._stream.add(token)) if self._stream else 0


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a position. bytes: its text in UTF-8; None for an incomplete character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A generated token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


def chat_logprobs(decoder: TokenDecoder, tokens: Iterable[TokenLogprob]) -> list[ChatTokenLogprob]:
    """Return the log probabilities of the tokens of a message."""
    return [
        ChatTokenLogprob(
            **_fields(decoder, token, logprob),
            top_logprobs=[TopLogprob(**_fields(decoder, *other)) for other in likeliest],
        )
        for token, logprob, likeliest in tokens
    ]


def _fields(decoder: TokenDecoder, token: int, logprob: float) -> dict:
    text = decoder.decode(token)
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
