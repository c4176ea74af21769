"""Convert scenes to lines of text, in Unicode or ASCII; each line is a sequence of parts with a background colour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from meshwright.pictures.scene import Box, Label, Line, Scene
from meshwright.support.encoding import to_ascii

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8

_JOINTS = {
    _UP | _DOWN: "│",
    _LEFT | _RIGHT: "─",
    _DOWN | _RIGHT: "┌",
    _DOWN | _LEFT: "┐",
    _UP | _RIGHT: "└",
    _UP | _LEFT: "┘",
    _LEFT | _RIGHT | _DOWN: "┬",
    _LEFT | _RIGHT | _UP: "┴",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
    _UP: "│",
    _DOWN: "│",
    _LEFT: "─",
    _RIGHT: "─",
}
"""The box-drawing character, by the directions in which rules leave its middle."""


class Span(NamedTuple):
    """A part of a line of text. fill: its background colour, such as `#b4cfee`; None for none."""

    text: str
    fill: str | None = None


Cells = dict[int, Span]
"""The characters of a line, by column."""


def lines_of(scene: Scene, *, is_ascii: bool = False) -> list[tuple[Span, ...]]:
    """Return the lines of a scene, each as parts of one colour. Trailing spaces without a colour are removed."""
    shown = to_ascii if is_ascii else str
    rows: defaultdict[int, Cells] = defaultdict(dict)
    for (row, column), sign in _rules(scene).items():
        rows[row][column] = Span(shown(sign))
    for item in scene.items:
        if isinstance(item, Box) and item.edge != "sheet":
            _write_box(rows, item, shown)
        elif isinstance(item, Label):
            _write(rows[int(item.y)], round(item.x), shown(item.text), None)
    return [_joined(rows[row]) for row in range(max(rows, default=-1) + 1)]


def _rules(scene: Scene) -> dict[tuple[int, int], str]:
    """Return the characters of lines and of boxes' rules, by (row, column); rules are joined where they meet."""
    ways: defaultdict[tuple[int, int], int] = defaultdict(int)
    dashed: dict[tuple[int, int], str] = {}
    for item in scene.items:
        if isinstance(item, Line) and item.is_faint:
            continue
        if isinstance(item, Line) and item.is_dashed:
            # A dashed line is shown by one character in its middle.
            middle = int(item.y + item.height / 2), int(item.x + item.width / 2)
            dashed[middle] = "╌" if item.width else "┆"
        elif isinstance(item, Line) and item.width and item.height:
            for step in range(round(item.width)):
                dashed[int(item.y + item.height * step / item.width), int(item.x + step)] = "·"
        elif isinstance(item, Line):
            _rule(ways, item.x, item.y, item.width, item.height)
        elif isinstance(item, Box) and item.edge == "ruled":
            for x, y, width, height in (
                (item.x, item.y, item.width, 0),
                (item.x, item.y + item.height, item.width, 0),
                (item.x, item.y, 0, item.height),
                (item.x + item.width, item.y, 0, item.height),
            ):
                _rule(ways, x, y, width, height)
    return {at: _JOINTS[way] for at, way in ways.items()} | dashed


def _rule(ways: defaultdict[tuple[int, int], int], x: float, y: float, width: float, height: float) -> None:
    """Add to `ways`, for each (row, column) that a line passes, the directions in which the line leaves it."""
    first_row, last_row, first, last = int(y), int(y + height), int(x), int(x + width)
    for column in range(first, last) if width else ():
        ways[first_row, column] |= _RIGHT
        ways[first_row, column + 1] |= _LEFT
    for row in range(first_row, last_row) if height else ():
        ways[row, first] |= _DOWN
        ways[row + 1, first] |= _UP


def _write_box(rows: defaultdict[int, Cells], box: Box, shown: Callable[[str], str]) -> None:
    """Write the text of a box to `rows`. A box with a fill or an outline covers what was written there before."""
    inset = 1 if box.edge == "ruled" else 0
    left, width = int(box.x) + inset, int(box.x + box.width) - int(box.x) - inset
    top, height = int(box.y) + inset, max(1, int(box.y + box.height) - int(box.y) - inset)
    text = shown(box.text)
    if box.fill or box.edge == "outlined":
        for row in range(top, top + height):
            _write(rows[row], left, " " * width, box.fill)
    sign = "›" if box.edge == "marked" else " "
    line = shown(sign) + text if box.is_left else text.center(width)
    _write(rows[top + (height - 1) // 2], left, line, box.fill)


def _write(cells: Cells, column: int, text: str, fill: str | None) -> None:
    for number, character in enumerate(text):
        cells[column + number] = Span(character, fill)


def _joined(cells: Cells) -> tuple[Span, ...]:
    """Return the characters of a line, joined to parts of one colour each."""
    blank = Span(" ")
    used = [column for column, piece in cells.items() if piece != blank]
    line = [cells.get(column, blank) for column in range(max(used, default=-1) + 1)]
    return tuple(
        Span("".join(piece.text for piece in run), fill) for fill, run in groupby(line, key=lambda piece: piece.fill)
    )
