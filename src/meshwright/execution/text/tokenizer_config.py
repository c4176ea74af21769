"""Changes by tokenizer_config.json, as in transformers 5: added tokens, and spaces before texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshwright.errors import MeshwrightError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The space character of SentencePiece tokens."""

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The fields of tokenizer_config.json that hold a special token."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The fields of an added token beyond its text."""

WITH_THEIR_FILE = frozenset(
    ("mistral", "mistral3", "ministral", "ministral3", "mixtral", "phi3", "olmo2", "qwen2", "qwen2_moe")
)
"""The model_types whose tokenizer.json transformers reads as it stands though the config names `LlamaTokenizer`."""


def apply_tokenizer_config(
    tokenizer: Tokenizer, config: Mapping[str, Any], *, model_type: str, has_file: bool, vocab: int
) -> None:
    """Change a tokenizer as transformers does by its tokenizer_config.json.

    Args:
        model_type: of config.json.
        has_file: whether it comes of a tokenizer.json, and not of a SentencePiece model.
        vocab: the rows of the model's table; named tokens that would have a number beyond it are left out.

    Raises:
        MeshwrightError: a token with another number than tokenizer_config.json gives it.
    """
    if (has_file or config.get("legacy") is False) and _is_rebuilt(tokenizer, config, model_type):
        _rebuild_spaces(tokenizer, config)
    for number, token in _numbered(config):
        # A piece of the SentencePiece model has its kind from there.
        if not has_file and number < tokenizer.get_vocab_size():
            continue
        _add(tokenizer, token)
        if tokenizer.token_to_id(token.content) != number:
            raise MeshwrightError(
                f"tokenizer_config.json gives {token.content!r} the token {number}; it is"
                f" {tokenizer.token_to_id(token.content)} here, of {tokenizer.get_vocab_size()} tokens"
            )
    for token in _named(config):
        if tokenizer.token_to_id(token.content) is None and tokenizer.get_vocab_size() < vocab:
            tokenizer.add_tokens([token])


def _is_rebuilt(tokenizer: Tokenizer, config: Mapping[str, Any], model_type: str) -> bool:
    """Whether transformers takes only tokens and merges of a tokenizer.json, and prepares text as its class does."""
    is_llama = str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
    is_of_bytes = "ByteLevel" in str(tokenizer.pre_tokenizer)
    return (
        is_llama and model_type not in WITH_THEIR_FILE and isinstance(tokenizer.model, models.BPE) and not is_of_bytes
    )


def _rebuild_spaces(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Prepare text as `LlamaTokenizer` of transformers 5: `legacy` (false) and `add_prefix_space` (true) are its own.

    A space stands before a text, and with `legacy` after each special token too.
    """
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])


def _numbered(config: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """The tokens of `added_tokens_decoder`, lowest number first."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping) or not all(str(number).isdecimal() for number in entries):
        raise MeshwrightError("tokenizer_config.json has added_tokens_decoder; it takes an object of tokens by number")
    for number, entry in sorted((int(number), entry) for number, entry in entries.items()):
        yield number, _token(entry)


def _named(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """The special tokens that have a field of their own, and those listed."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = list(extra.values()) if isinstance(extra, Mapping) else extra if isinstance(extra, list) else []
    for entry in (*(config.get(name) for name in NAMED), *listed):
        if entry:
            token = _token(entry)
            token.special = True
            yield token


def _token(entry: Any) -> AddedToken:
    """Parse a token given as text or as an object."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
        return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in FLAGS if flag in entry})
    raise MeshwrightError(f"tokenizer_config.json has the token {entry!r}; it takes a text or an object with content")


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    """Add a token, or give one that is there the flags of this one."""
    known = tokenizer.get_added_tokens_decoder().values()
    if repr(token) not in map(repr, known):
        tokenizer.add_tokens([token])
