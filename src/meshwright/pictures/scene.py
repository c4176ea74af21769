"""A picture as data: boxes, lines and labels in one coordinate system, whose units are a character and a line.

Builders make scenes (`panels` of cells, `sections` of a page); `terminal` and `svg` write them. HTML pages contain them
as SVG.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Edge = Literal["none", "ruled", "outlined", "marked", "exposed", "sheet"]
"""The border of a box: none, a rule shared with neighbours, a separate border, a bold one, a red one, or a sheet.

A sheet is behind other boxes. Text omits it: only its lines are drawn there.
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a text in its middle, or (`is_left`) one character from its left side.

    The corners of a ruled box are in the middle of characters, where its rules run. hint: the tooltip.
    """

    x: float
    y: float
    width: float
    height: float
    text: str = ""
    fill: str | None = None
    hint: str = ""
    edge: Edge = "none"
    is_left: bool = False


@dataclass(frozen=True)
class Line:
    """A line from x, y. In text, a diagonal line becomes dots and a faint one is omitted."""

    x: float
    y: float
    width: float
    height: float
    colour: str | None = None
    is_dashed: bool = False
    is_faint: bool = False


@dataclass(frozen=True)
class Label:
    """A line of text that starts at x, y."""

    x: float
    y: float
    text: str
    is_bold: bool = False


@dataclass(frozen=True)
class Scene:
    """Shapes to draw, in order, within a width and a height."""

    width: float
    height: float
    items: tuple[Box | Line | Label, ...] = ()


def paragraph(text: str, width: float, *, is_bold: bool = False) -> Scene:
    """Return a text wrapped to `width` characters; it is broken first at gaps of three spaces."""
    lines = (
        [text]
        if len(text) <= width
        else [line for part in text.split("   ") for line in textwrap.wrap(part, int(width), subsequent_indent="  ")]
    )
    labels = tuple(Label(0, number, line, is_bold) for number, line in enumerate(lines) if line)
    return Scene(max(map(len, lines)), len(lines), labels)


def moved(scene: Scene, x: float, y: float) -> Scene:
    """Return a scene shifted by x, y."""
    items = tuple(replace(item, x=item.x + x, y=item.y + y) for item in scene.items)
    return Scene(scene.width + x, scene.height + y, items)


def together(scenes: Iterable[Scene]) -> Scene:
    """Place scenes on top of each other."""
    found = list(scenes)
    items = tuple(item for scene in found for item in scene.items)
    return Scene(max((s.width for s in found), default=0), max((s.height for s in found), default=0), items)


def stack(scenes: Iterable[Scene], *, gap: float = 0) -> Scene:
    """Place scenes one below the other."""
    placed, y = [], 0.0
    for scene in scenes:
        placed.append(moved(scene, 0, y))
        y += scene.height + gap
    return together(placed)


def flow(scenes: Sequence[Scene], width: float) -> Scene:
    """Place scenes in columns of equal width, in as many rows as needed."""
    gap = 3
    column = max(scene.width for scene in scenes) + gap
    across = max(1, int((width + gap) // column))
    rows = [scenes[start : start + across] for start in range(0, len(scenes), across)]
    return stack(
        (together(moved(scene, number * column, 0) for number, scene in enumerate(row)) for row in rows), gap=1
    )
