"""The texts of tokens, one by one, and the log probabilities of tokens as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from pydantic import BaseModel

from meshwright.serving.request import TokenLogprob
from meshwright.text import REPLACEMENT, Tokenizer, TokenStream

ANCHOR = "a"
"""The text before a token whose own text is wanted: a tokenizer may leave out the space that begins a text."""


class TokenTexts:
    """The text of each token alone; of one without text (a special token) its name in the vocabulary.

    tokenizer: without one, texts are as `token_id:42`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no whole character are replaced."""
        if token not in self._known:
            self._known[token] = self._alone(token) or self._names.get(token, "")
        return self._known[token]

    def _alone(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        anchor = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
        return self.tokenizer.decode([*anchor, token]).removeprefix(self.tokenizer.decode(anchor))

    @cached_property
    def _names(self) -> dict[int, str]:
        vocabulary = self.tokenizer.codec.vocabulary() if self.tokenizer else {}
        return {number: name for name, number in vocabulary.items()}


class CompletionLogprobs(BaseModel):
    """The log probabilities of a completion's tokens.

    Args:
        tokens: their texts. token_logprobs: None of the first token of a prompt, which nothing predicts.
        top_logprobs: by texts, of the likeliest tokens and the one that was taken. text_offset: where each begins.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionTokens:
    """The tokens of one completion as they come, and where in its text each begins."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._stream = TokenStream(texts.tokenizer) if texts.tokenizer else None
        self._offset = 0

    def logprobs(self, first: Sequence[int], tokens: Iterable[TokenLogprob]) -> CompletionLogprobs:
        """The log probabilities of more tokens. first: tokens before them, which nothing predicts."""
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in first:
            self._add(found, token)
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
        for token, logprob, likeliest in tokens:
            self._add(found, token)
            found.token_logprobs.append(logprob)
            top: dict[str, float] = {}
            # Of tokens with the same text (bytes of cut characters) the likeliest is the one that is said.
            for other, value in (*likeliest, (token, logprob)):
                top.setdefault(self._texts.text(other), value)
            found.top_logprobs.append(top)
        return found

    def _add(self, found: CompletionLogprobs, token: int) -> None:
        found.tokens.append(self._texts.text(token))
        found.text_offset.append(self._offset)
        self._offset += len(self._stream.add(token)) if self._stream else 0


class LikelyToken(BaseModel):
    """A token that could have been taken. bytes: of its text in UTF-8; None of a cut character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TakenToken(LikelyToken):
    """A token that was taken, and the likeliest ones in its place."""

    top_logprobs: list[LikelyToken]


def chat_logprobs(texts: TokenTexts, tokens: Iterable[TokenLogprob]) -> list[TakenToken]:
    """The log probabilities of a message's tokens."""
    return [
        TakenToken(
            **_likely(texts, token, logprob),
            top_logprobs=[LikelyToken(**_likely(texts, *other)) for other in likeliest],
        )
        for token, logprob, likeliest in tokens
    ]


def _likely(texts: TokenTexts, token: int, logprob: float) -> dict:
    text = texts.text(token)
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
