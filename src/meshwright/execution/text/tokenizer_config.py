"""Apply tokenizer_config.json to a tokenizer as transformers 5 does: added tokens, and spaces before texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshwright.errors import MeshwrightError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The space character of SentencePiece tokens."""

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The fields of tokenizer_config.json that hold one special token each."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The fields of an added token besides its text."""

WITH_THEIR_FILE = frozenset(
    (
        *("mistral", "mistral3", "ministral", "ministral3", "mixtral", "phi3", "olmo2", "qwen2", "qwen2_moe"),
        *("ernie4_5", "glm4", "glm4_moe", "granite", "granitemoe", "nemotron", "olmo3"),
    )
)
"""The model types whose tokenizer.json transformers uses unchanged, although the config names `LlamaTokenizer`."""


def apply_tokenizer_config(
    tokenizer: Tokenizer, config: Mapping[str, Any], *, model_type: str, has_file: bool, vocab: int
) -> None:
    """Change `tokenizer` in place as transformers does, by its tokenizer_config.json.

    Args:
        config: contents of tokenizer_config.json.
        model_type: the field of config.json.
        has_file: whether the tokenizer comes from a tokenizer.json, and not from a SentencePiece model.
        vocab: number of rows of the model's embedding table. A special token that the tokenizer lacks is added only if
          its id is below it.

    Raises:
        MeshwrightError: a token has another id than tokenizer_config.json gives it.
    """
    if (has_file or config.get("legacy") is False) and _is_rebuilt(tokenizer, config, model_type):
        # As `LlamaTokenizer` of transformers 5: unless `add_prefix_space` is false, a space is put before a text; if
        # `legacy` is true, also after special tokens.
        has_prefix = config.get("add_prefix_space") is not False
        scheme = "never" if not has_prefix else "always" if config.get("legacy") else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*joined, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    for number, token in _numbered(config):
        # The flags of a SentencePiece model's own pieces come from the model.
        if not has_file and number < tokenizer.get_vocab_size():
            continue
        # A token that exists already gets these flags.
        if repr(token) not in map(repr, tokenizer.get_added_tokens_decoder().values()):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise MeshwrightError(
                f"tokenizer_config.json gives {token.content!r} the token {number}; it is"
                f" {tokenizer.token_to_id(token.content)} here, of {tokenizer.get_vocab_size()} tokens"
            )
    for token in _named(config):
        if tokenizer.token_to_id(token.content) is None and tokenizer.get_vocab_size() < vocab:
            tokenizer.add_tokens([token])


def _is_rebuilt(tokenizer: Tokenizer, config: Mapping[str, Any], model_type: str) -> bool:
    """Whether transformers takes only tokens and merges from the file, and prepares text as `LlamaTokenizer` does."""
    is_llama = str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
    is_of_bytes = "ByteLevel" in str(tokenizer.pre_tokenizer)
    return (
        is_llama and model_type not in WITH_THEIR_FILE and isinstance(tokenizer.model, models.BPE) and not is_of_bytes
    )


def _numbered(config: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Yield (id, token) for each token of `added_tokens_decoder`, by increasing id. Raises if the field is invalid."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping) or not all(str(number).isdecimal() for number in entries):
        raise MeshwrightError("tokenizer_config.json has added_tokens_decoder; it takes an object of tokens by number")
    for number, entry in sorted((int(number), entry) for number, entry in entries.items()):
        yield number, _token(entry)


def _named(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the special tokens of the fields `NAMED`, then those listed as extra or additional special tokens."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = list(extra.values()) if isinstance(extra, Mapping) else extra if isinstance(extra, list) else []
    for entry in (*(config.get(name) for name in NAMED), *listed):
        if entry:
            token = _token(entry)
            token.special = True
            yield token


def _token(entry: Any) -> AddedToken:
    """Return a token that is given as text or as an object. Raises if it is neither."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
        return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in FLAGS if flag in entry})
    raise MeshwrightError(f"tokenizer_config.json has the token {entry!r}; it takes a text or an object with content")
