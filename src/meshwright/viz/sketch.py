"""What a picture shows, before it is drawn as text or as SVG: panels of cells with labels and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Item = TypeVar("Item")

Frame = Literal["ruled", "open", "linked"]
"""How cells stand together: in a grid of rules, in bare columns, or as chips joined by links."""


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the number of its colour (None for none), what is said of it at length, and a mark."""

    text: str
    colour: int | None = None
    hint: str = ""
    is_marked: bool = False


GAP = "…"
"""The label and the text of what was left out."""

MAX_PANELS = 8
"""The panels of one array or one torus that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Rows of cells, all of one length, with a label for each row and column, or none at all.

    notes: what is said beside it. wraps: in a linked panel, whether links join the last row to the first and the last
    column to the first. cell_width, cell_height: the least size of a cell, in characters and lines.
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
        """The characters that its widest cell or column label takes, with a space on either side of a cell's text."""
        texts = [len(cell.text) + 2 for row in self.cells for cell in row]
        return max(self.cell_width, *texts, *(len(label) for label in self.columns))


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A title, panels one under the other (side by side in a gallery), and notes at the end."""

    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    is_gallery: bool = False


def elide(panel: Panel, *, max_rows: int, max_columns: int) -> Panel:
    """The panel with no more rows and columns than that: those in the middle give way to one of `…`."""
    cells = [_elide(row, max_columns, Cell(GAP)) for row in panel.cells]
    gap_row = (Cell(GAP),) * len(cells[0])
    return replace(
        panel,
        cells=_elide(cells, max_rows, gap_row),
        rows=_elide(panel.rows, max_rows, GAP),
        columns=_elide(panel.columns, max_columns, GAP),
    )


def _elide(items: Sequence[Item], most: int, gap: Item) -> tuple[Item, ...]:
    """The items, their middle replaced by a gap where there are more than `most`."""
    if len(items) <= most:
        return tuple(items)
    last = max(1, (most - 1) // 3)
    return (*items[: most - 1 - last], gap, *items[-last:])


def few(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """The panels; of more than `MAX_PANELS` the first few and the last, whose caption says how many are left out."""
    if len(panels) <= MAX_PANELS:
        return tuple(panels)
    kept, last = panels[: MAX_PANELS // 2], panels[-1]
    return (*kept, replace(last, caption=f"{GAP} {len(panels) - len(kept) - 1} left out {GAP} {last.caption}"))
