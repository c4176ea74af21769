"""Bound the number of characters of a token, so that a text with too many tokens is rejected before it is tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEEPING = {"Sequence", "Prepend", "Replace", "NFC", "ByteLevel"}
"""Normalizers that do not shorten a text, except that NFC joins up to four characters into one."""

SPLITTING = {"Sequence", "ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"}
"""Pre-tokenizers that drop no character, unless their behavior is `Removed`."""


def most_characters(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the maximum number of characters of a text that one token stands for; None if no bound is known.

    tokenizer: contents of a tokenizer.json.
    """
    model = tokenizer["model"]
    normalizers, splits = [*_parts(tokenizer["normalizer"])], [*_parts(tokenizer["pre_tokenizer"])]
    kinds = {part["type"] for part in normalizers}
    is_bytes = bool(model.get("byte_fallback")) or any(part["type"] == "ByteLevel" for part in (*normalizers, *splits))
    if (
        model["type"] not in ("BPE", "Unigram")
        or not is_bytes  # Characters without their own token may be dropped, or several merged into one token.
        or kinds - KEEPING
        or {part["type"] for part in splits} - SPLITTING
        or any(part.get("behavior") == "Removed" for part in splits)
        or any(_shortens(part) for part in normalizers)
        or any(token["lstrip"] or token["rstrip"] for token in tokenizer["added_tokens"])
    ):
        return None
    pieces = model["vocab"] if model["type"] == "BPE" else (piece for piece, _ in model["vocab"])
    added = (len(token["content"]) for token in tokenizer["added_tokens"])
    return max((*map(len, pieces), *added), default=0) * (4 if "NFC" in kinds else 1) or None


def _parts(whole: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer or pre-tokenizer, then the parts that it is composed of; nothing for None."""
    if whole is not None:
        yield whole
        for part in whole.get("normalizers") or whole.get("pretokenizers") or ():
            yield from _parts(part)


def _shortens(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer may replace characters by fewer characters."""
    if part["type"] != "Replace":
        return False
    pattern = part["pattern"].get("String")
    return pattern is None or len(part["content"]) < len(pattern)
