"""Tokenizers: that of a Hugging Face directory, or the byte tokenizer if a model was trained on bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.execution.text.characters import most_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

PIECES = ("tokenizer.model", "spiece.model")
"""Names of a file with a SentencePiece model, which is used if there is no tokenizer.json."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *PIECES,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Names of the files of a directory that may hold its tokenizer and its chat template."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character to which the bytes of an incomplete character are decoded."""


class _Codec(Protocol):
    """The functions of a tokenizer; see the methods of `Tokenizer`. `vocabulary` returns {token text: token id}."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str: ...
    def vocabulary(self) -> dict[str, int]: ...
    def to_json(self) -> str | None: ...
    def most_characters(self) -> int | None: ...


class _Bytes:
    """One token for each byte of UTF-8."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return list(text.encode(errors="surrogateescape"))

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        sizes = [len(character.encode(errors="surrogateescape")) for character in text]
        places = [(at, at + 1) for at, size in enumerate(sizes) for _ in range(size)]
        return self.encode(text, add_special_tokens=False), places

    def vocabulary(self) -> dict[str, int]:
        return {f"{byte:02x}": byte for byte in range(256)}

    def to_json(self) -> str | None:
        return None

    def most_characters(self) -> int | None:
        return 1

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class _FromFile:
    """The tokenizer of a `tokenizer.json`."""

    tokenizer: HuggingFaceTokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode_batch` even for one text, because it releases the interpreter's lock and `encode` does not.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def to_json(self) -> str | None:
        return self.tokenizer.to_str()

    def most_characters(self) -> int | None:
        return most_characters(json.loads(self.tokenizer.to_str()))

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Converts text to tokens and back.

    Args:
        codec: the tokenizer itself.
        num_tokens: the highest token id plus 1.
        stop_tokens: token ids that end a text.
        config: contents of `tokenizer_config.json`, including the chat template and the names of special tokens.
    """

    codec: _Codec
    num_tokens: int
    stop_tokens: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text. add_special_tokens: with those that begin or end every text of this model."""
        return self.codec.encode(text, add_special_tokens)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text, and each token's (start, stop) in characters of the text; no special tokens."""
        return self.codec.encode_with_places(text)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, by default without special tokens."""
        return self.codec.decode(tokens, skip_special_tokens)

    def to_json(self) -> str | None:
        """Return the text of a tokenizer.json; None if tokens are bytes."""
        return self.codec.to_json()

    @cached_property
    def most_characters(self) -> int | None:
        """The maximum number of characters of a text that one token stands for; None if no bound is known."""
        return self.codec.most_characters()

    @property
    def fingerprint(self) -> str:
        """A checksum of the vocabulary, the tokens of a sample text, and the stop tokens.

        It is not a checksum of the file, because libraries write the same tokenizer in several forms.
        """
        sample = self.encode(_SAMPLE, add_special_tokens=True)
        known = json.dumps([sorted(self.codec.vocabulary().items()), sample, self.stop_tokens])
        return hashlib.sha256(known.encode()).hexdigest()


_SAMPLE = (
    "The quick brown fox, it's 1234567.89% of 3x\u00b2 \u2260 na\u00efve!\n\n\tdef f(x):\r\n        return x  # fine\n"
    "\u4e2d\u6587\u8a00\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628\u064a \ud55c\uad6d\uc5b4"
    " \U0001f680\U0001f469\u200d\U0001f4bb  supercalifragilistic https://example.org/?q=a&b=c_d-E"
)
"""Words, numbers, spaces, code and scripts: text that pre-tokenizers and merges of tokenizers treat differently."""


class TokenStream:
    """Incremental decoding: returns text in pieces that end at character boundaries.

    Tokens may not decode to the same text separately as together (a leading space, a character of several tokens), so a
    piece is the text that the newest tokens add to the text of the tokens before them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        self._shown = 0
        """Number of tokens whose text was returned; those from `_start` on are decoded again before newer tokens."""
        self._start = 0

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while the last character is incomplete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        text = self._decode(self._tokens[self._start :])
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """Return the remaining text at the end; an incomplete character becomes a replacement character."""
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are bytes."""
    return Tokenizer(codec=_Bytes(), num_tokens=256)


def byte_tokenizer_for(vocab: int) -> Tokenizer | None:
    """Return the byte tokenizer for a model without a tokenizer, if its vocabulary is the 256 bytes; else None."""
    tokenizer = byte_tokenizer()
    return tokenizer if vocab == tokenizer.num_tokens else None


def read_tokenizer(directory: Path, *, vocab: int) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face directory; None if it has none.

    vocab: number of rows of the model's embedding table.

    Raises:
        MeshwrightError: a file cannot be read, the tokenizer has another format than `tokenizer.json` or SentencePiece,
          or it has token ids from `vocab` on.
    """
    # These import `tokenizers`, part of the extras [train] and [serve]; bytes as tokens do not need it.
    from meshwright.execution.text.sentencepiece import read_sentencepiece
    from meshwright.execution.text.tokenizer_config import apply_tokenizer_config

    config = read_json(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    pieces = next((directory / name for name in PIECES if (directory / name).is_file()), None)
    if path.is_file():
        of = _read_file(path)
    elif pieces:
        of = read_sentencepiece(pieces, config)
    elif (directory / "vocab.json").is_file():
        raise MeshwrightError(
            f"{directory} has vocab.json and no tokenizer.json; transformers writes one:"
            f" `AutoTokenizer.from_pretrained(…).save_pretrained(…)`"
        )
    else:
        return None
    model_type = str(read_json(directory / "config.json").get("model_type"))
    apply_tokenizer_config(of, config, model_type=model_type, has_file=path.is_file(), vocab=vocab)
    of.no_padding()
    of.no_truncation()
    num_tokens = max(of.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if num_tokens > vocab:
        raise MeshwrightError(
            f"the tokenizer of {directory} has tokens up to {num_tokens - 1}; config.json has a vocab_size of {vocab}:"
            f" they belong to different models"
        )
    template = directory / "chat_template.jinja"
    if template.is_file():
        config |= {"chat_template": template.read_text(encoding="utf-8")}
    return Tokenizer(
        codec=_FromFile(of),
        num_tokens=num_tokens,
        stop_tokens=_stop_tokens(directory, of, config, vocab),
        config=config,
    )


def _read_file(path: Path) -> HuggingFaceTokenizer:
    """Return the tokenizer of a `tokenizer.json`. Raises if the file cannot be read as one."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    try:
        return HuggingFaceTokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # The library raises bare exceptions.
        raise MeshwrightError(f"{path} is not a tokenizer: {str(error).splitlines()[0]}") from None


def _stop_tokens(
    directory: Path, tokenizer: HuggingFaceTokenizer, config: dict[str, Any], vocab: int
) -> tuple[int, ...]:
    """Return the token ids that end a text, from generation_config.json, else config.json, else the tokenizer's config.

    Raises:
        MeshwrightError: an id is not below `vocab`.
    """
    for name in ("generation_config.json", "config.json"):
        stop = read_json(directory / name).get("eos_token_id")
        if stop is not None:
            tokens = stop if isinstance(stop, list) else [stop]
            for token in tokens:
                if type(token) is not int or not 0 <= token < vocab:
                    raise MeshwrightError(
                        f"{directory / name} has the eos_token_id {token!r}; the model has the tokens 0 to {vocab - 1}"
                    )
            return tuple(tokens)
    token = special_token(config, "eos_token")
    number = tokenizer.token_to_id(token) if token else None
    return () if number is None else (number,)


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Return the text of the special token that `config` has as field `name`; None if there is none.

    The field's value is the text, or an object with the text as `content`.
    """
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None  # The name of `add_bos_token` ends like these; it is a boolean.


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file.

    Raises:
        MeshwrightError: the file cannot be read, or is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"{path} holds a {type(data).__name__}, not an object")
    return data
