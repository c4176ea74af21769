"""A picture as data: boxes, lines and labels in one coordinate system.

Horizontal lengths are in characters, vertical ones in lines of text. `panels` and `sections` make scenes, `terminal`
and `svg` write them. HTML pages contain them as SVG.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Edge = Literal["none", "ruled", "outlined", "marked", "exposed", "sheet"]
"""The border of a box.

ruled: a rule that is shared with neighbours. outlined: a border of its own. marked: a bold one. exposed: a red one.
sheet: the border of an empty grid behind other boxes; text leaves it out, since separate lines draw its edges.
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a text in its middle, or (`is_left`) at its left after a space. hint: the tooltip.

    The corners of a ruled box are in the middle of characters, because its rules are there.
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
    """A line from (x, y) to (x + width, y + height). In text, diagonal lines become dots, faint lines are left out."""

    x: float
    y: float
    width: float
    height: float
    colour: str | None = None
    is_dashed: bool = False
    is_faint: bool = False


@dataclass(frozen=True)
class Label:
    """A line of text that starts at (x, y)."""

    x: float
    y: float
    text: str
    is_bold: bool = False


@dataclass(frozen=True)
class Scene:
    """Shapes to draw in their order, within a width and a height."""

    width: float
    height: float
    items: tuple[Box | Line | Label, ...] = ()


def paragraph(text: str, width: float, *, is_bold: bool = False) -> Scene:
    """Return a text as a scene, wrapped to `width` characters; it is broken first where it has three spaces."""
    lines = (
        [text]
        if len(text) <= width
        else [line for part in text.split("   ") for line in textwrap.wrap(part, int(width), subsequent_indent="  ")]
    )
    labels = tuple(Label(0, number, line, is_bold) for number, line in enumerate(lines) if line)
    return Scene(max(map(len, lines)), len(lines), labels)


def moved(scene: Scene, x: float, y: float) -> Scene:
    """Return a scene shifted by x to the right and by y down."""
    items = tuple(replace(item, x=item.x + x, y=item.y + y) for item in scene.items)
    return Scene(scene.width + x, scene.height + y, items)


def together(scenes: Iterable[Scene]) -> Scene:
    """Return scenes drawn over each other, all from the same corner."""
    found = list(scenes)
    items = tuple(item for scene in found for item in scene.items)
    return Scene(max((s.width for s in found), default=0), max((s.height for s in found), default=0), items)


def stack(scenes: Iterable[Scene], *, gap: float = 0) -> Scene:
    """Return scenes one below the other; gap: lines between them."""
    placed, y = [], 0.0
    for scene in scenes:
        placed.append(moved(scene, 0, y))
        y += scene.height + gap
    return together(placed)


def flow(scenes: Sequence[Scene], width: float) -> Scene:
    """Return scenes side by side in columns of equal width, in as many rows as a width requires."""
    gap = 3
    column = max(scene.width for scene in scenes) + gap
    across = max(1, int((width + gap) // column))
    rows = [scenes[start : start + across] for start in range(0, len(scenes), across)]
    return stack(
        (together(moved(scene, number * column, 0) for number, scene in enumerate(row)) for row in rows), gap=1
    )
