"""ASCII replacements for characters that the encoding of a terminal or pipe lacks."""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata

_SPOKEN = {
    "·": "-", "×": "x", "…": "...", "–": "-", "—": "-", "−": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "≈": "~",
    "±": "+-", "µ": "u", "μ": "u", "•": "*", "√": "sqrt", "∞": "inf", "²": "2", "³": "3", "✓": "v", "✗": "x", "∂": "d",
    "●": "o", "█": "#", "›": ">", "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ",
}  # fmt: skip
"""ASCII replacements that cannot be derived from a character's Unicode name or decomposition."""


def write_ascii_where_needed() -> None:
    """Make stdout and stderr write what `to_ascii` returns for each character that their encoding lacks.

    A stream that the shell closed discards its output.
    """
    # Python sets a stream that the shell closed (`>&-`) to None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("meshwright", _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("_", "-")
        if encoding not in ("utf-8", "utf8") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="meshwright")  # pyright: ignore[reportAttributeAccessIssue]


def to_ascii(text: str) -> str:
    """Return a text in ASCII, every other character replaced by what looks or reads like it."""
    return "".join(char if char.isascii() else _ascii(char) for char in text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace the characters that an encoding lacks by ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end


def _ascii(char: str) -> str:
    """Return the ASCII replacement of one character; `?` if there is none."""
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
