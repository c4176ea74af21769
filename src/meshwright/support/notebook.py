"""Notebook output of a plan, a record or an inspection: a title, an answer and small tables, as HTML.

The HTML is self-contained and escaped, without scripts, in the notebook's own font and colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""The column headings, and the rows."""

_CELL = "padding:1px 12px 1px 0;text-align:left;background:none"


def card(title: str, answer: str, tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """Return HTML with a title, the answer in bold, tables and notes; tables without rows are left out."""
    parts = [f"<div><div>{escape(title)}</div><div><b>{escape(answer)}</b></div>"]
    for heads, rows in tables:
        if body := "".join(_row("td", row) for row in rows):
            head = _row("th", heads) if any(heads) else ""
            parts.append(f'<table style="margin:6px 0;border-collapse:collapse">{head}{body}</table>')
    parts += [f'<div style="opacity:.7">{escape(note)}</div>' for note in notes]
    return "".join([*parts, "</div>"])


def _row(tag: str, cells: Iterable[str]) -> str:
    """Return the HTML of a table row; tag: `td`, or `th` for headings."""
    return "<tr>" + "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"
