"""Text for terminals and pipes whose encoding lacks characters that the screens use: ASCII that means the same."""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata

_SPOKEN = {
    "·": "-", "×": "x", "…": "...", "–": "-", "—": "-", "−": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "≈": "~",
    "±": "+-", "µ": "u", "μ": "u", "•": "*", "√": "sqrt", "∞": "inf", "²": "2", "³": "3", "✓": "v", "✗": "x", "∂": "d",
    "›": ">", "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ",
}  # fmt: skip
"""Characters whose names do not lead to ASCII."""


def write_ascii_where_needed() -> None:
    """Have stdout and stderr write ASCII for each character that their encoding lacks; closed ones write nothing."""
    # Python has None for a stream that the shell closed (`>&-`).
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("meshwright", _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("_", "-")
        if encoding not in ("utf-8", "utf8") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="meshwright")  # pyright: ignore[reportAttributeAccessIssue]


def to_ascii(text: str) -> str:
    """A text in ASCII, every character that is none replaced by what looks or reads like it."""
    return "".join(char if char.isascii() else _ascii(char) for char in text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """The handler of characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end


def _ascii(char: str) -> str:
    """One character."""
    if char in _SPOKEN:
        return _SPOKEN[char]
    name = unicodedata.name(char, "")
    if name.startswith("BOX DRAWINGS"):
        if " AND " in name:  # A corner or a joint.
            return "+"
        return "-" if name.endswith(" HORIZONTAL") else "|" if name.endswith(" VERTICAL") else "+"
    if "BLOCK" in name or "SHADE" in name:
        return "#"
    if name.startswith("BRAILLE"):
        return "*"
    plain = unicodedata.normalize("NFKD", char)
    return "".join(part for part in plain if part.isascii()) or "?"
