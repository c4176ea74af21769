"""Wrap text to the width of the terminal. Imports only what is fast to load, because help texts use this module."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping

WIDTH = 100
"""The width of output that does not go to a terminal, and the largest width of prose: longer lines are hard to read.
"""


def terminal_columns() -> int | None:
    """Return the columns of stdout's terminal; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def prose_width() -> int:
    """Return the width of a line of prose: the terminal's, at most `WIDTH`."""
    return min(terminal_columns() or WIDTH, WIDTH)


def wrap(text: str, width: int | None = None, first: str = "", then: str = "") -> list[str]:
    """Return a text as lines of a width, by default that of prose. Words, and numbers with their units, are not broken.

    first, then: indentation of the first line, and of the others.
    """
    lines = textwrap.wrap(
        _WITH_UNIT.sub("\\1\0", text),
        width or prose_width(),
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


_WITH_UNIT = re.compile(r"(\d%?) (?=(?:[kMGTP]?(?:B|flop|op|tok|bit)(?:/s)?|s|ms|us|ns|of \d)\b)")


def folded(line: str) -> str:
    """Return a line indented by two more spaces; if it is too long, wrapped to several lines, indented too."""
    indent = " " * (len(line) - len(line.lstrip()))
    return "\n".join(wrap(line.strip(), first=f"  {indent}", then=f"  {indent or ' ' * 5}"))


def reasons(facts: Iterable[object]) -> str:
    """Return the reasons for a plan as lines; the first begins with `why:`."""
    return "\n".join(folded(f"     {fact}" if index else f"why: {fact}") for index, fact in enumerate(facts))


def terms(title: str, amounts: Mapping[str, str]) -> str:
    """Return a title followed by `name amount` pairs, wrapped."""
    words = "  ".join(f"{name} {amount}".replace(" ", "\0") for name, amount in amounts.items())
    return "\n".join(wrap(words, first=f" {title:<8}", then=" " * 9))


def next_line(*commands: str, note: str = "") -> str:
    """Return the last lines of a command's output: commands to run next, which are not wrapped, and a note."""
    found = [" next   " + "   or  ".join(commands) + (f"   ({note})" if note else "")]
    if len(found[0]) > prose_width():
        found = [f" next   {commands[0]}", *(f"   or   {command}" for command in commands[1:])]
        found += [f"        ({note})"] if note else []
    return "\n".join(["", *found])
