"""What a picture shows, independent of text or SVG: panels of cells with labels and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Item = TypeVar("Item")

Frame = Literal["ruled", "open", "linked"]
"""How cells are arranged: a grid with rules, bare columns, or chips joined by links."""


@dataclass(frozen=True)
class Cell:
    """A cell: text, colour number (None for none), tooltip, and a mark."""

    text: str
    colour: int | None = None
    hint: str = ""
    is_marked: bool = False


ELLIPSIS = "…"
"""Label and text of what is left out."""

MAX_PANELS = 8
"""Most panels drawn of one array or torus."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Rows of cells of equal length, with labels for rows and columns, or none.

    notes: text beside it. wraps: in a linked panel, whether links join the last row to the first, and the last column
    to the first. cell_width, cell_height: minimum size of a cell, in characters and lines.
    """

    cells: tuple[tuple[Cell, ...], ...]
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    caption: str = ""
    notes: tuple[str, ...] = ()
    frame: Frame = "ruled"
    wraps: tuple[bool, bool] = (False, False)
    cell_width: int = 0
    cell_height: int = 1

    @property
    def column_width(self) -> int:
        """Characters of its widest cell, with a space on either side, or column label."""
        texts = [len(cell.text) + 2 for row in self.cells for cell in row]
        return max(self.cell_width, *texts, *(len(label) for label in self.columns))


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A title, panels one below the other (side by side in a gallery), and notes."""

    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    is_gallery: bool = False


def elide(panel: Panel, *, max_rows: int, max_columns: int) -> Panel:
    """The panel with at most so many rows and columns; those in the middle are replaced by `…`."""
    cells = [_elide(row, max_columns, Cell(ELLIPSIS)) for row in panel.cells]
    gap_row = (Cell(ELLIPSIS),) * len(cells[0])
    return replace(
        panel,
        cells=_elide(cells, max_rows, gap_row),
        rows=_elide(panel.rows, max_rows, ELLIPSIS),
        columns=_elide(panel.columns, max_columns, ELLIPSIS),
    )


def _elide(items: Sequence[Item], most: int, gap: Item) -> tuple[Item, ...]:
    if len(items) <= most:
        return tuple(items)
    last = max(1, (most - 1) // 3)
    return (*items[: most - 1 - last], gap, *items[-last:])


def limit_panels(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """At most `MAX_PANELS` panels: the first few and the last, whose caption tells how many are left out."""
    if len(panels) <= MAX_PANELS:
        return tuple(panels)
    kept, last = panels[: MAX_PANELS // 2], panels[-1]
    return (
        *kept,
        replace(last, caption=f"{ELLIPSIS} {len(panels) - len(kept) - 1} left out {ELLIPSIS} {last.caption}"),
    )
