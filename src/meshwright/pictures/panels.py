"""Panels of cells, i.e. grids of shards, chips with links, or tables; and their conversion to a scene of some width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from meshwright.pictures.scene import Box, Label, Line, Scene, flow, moved, paragraph, stack, together

Item = TypeVar("Item")

Frame = Literal["ruled", "table", "linked"]
"""How a panel arranges its cells.

ruled: a grid with rules. table: columns as wide as needed. linked: chips joined by links.
"""

ELLIPSIS = "…"
"""The text in place of cells, labels or panels that are left out."""

MAX_PANELS = 8
"""The most panels drawn for one array or torus."""

_GALLERY = 130  # The largest width in characters of a row of panels: wider rows are hard to read.


@dataclass(frozen=True)
class Cell:
    """A cell of a panel. hint: the tooltip. is_marked: whether it has a bold edge, or a `›` in text.

    span: in a table, the number of columns that the cell covers. The cells that it covers have span 0 and the same
    fill, since a table that is too wide may be split between them. links: in a linked panel, whether the links to the
    next cell (in the row, in the column) are used; unused ones are faint.
    """

    text: str
    fill: str | None = None
    hint: str = ""
    is_marked: bool = False
    span: int = 1
    links: tuple[bool, bool] = (True, True)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Rows of cells, all of equal length, with optional labels of rows and columns."""

    cells: tuple[tuple[Cell, ...], ...]
    rows: tuple[str, ...] = ()
    row_fills: tuple[str, ...] = ()  # In a table: the colours behind the labels of rows; empty for no colours.
    columns: tuple[str, ...] = ()
    caption: str = ""  # Text above the panel.
    notes: tuple[str, ...] = ()  # Texts on the right of the panel, or below it.
    frame: Frame = "ruled"
    sheets: tuple[str, ...] = ()  # In a ruled panel: the colours of equal grids drawn behind it, the nearest first.
    # In a linked panel: whether links join (the last row to the first, the last column to the first).
    wraps: tuple[bool, bool] = (False, False)
    cell_width: int = 0  # The smallest width of a cell, in characters.
    cell_height: int = 1  # The height of a cell, in lines.

    @property
    def column_width(self) -> int:
        """The width of all columns in characters: of the widest cell with a space on either side, or of its label."""
        texts = [len(cell.text) + 2 + cell.is_marked for row in self.cells for cell in row]
        return max(self.cell_width, *texts, *(len(label) for label in self.columns))

    @property
    def pitch(self) -> int:
        """The distance in characters between columns if all are equally wide."""
        return self.column_width + (2 if self.frame == "linked" else 1)

    @property
    def label_width(self) -> int:
        """The length in characters of the longest row label and the space after it."""
        longest = max((len(label) for label in self.rows), default=0)
        return longest + bool(longest)


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A title, panels one below the other (side by side if `is_gallery`), and notes.

    draw: for drawings without cells; called with a width in characters, returns a scene that goes below the panels.
    """

    title: str
    panels: tuple[Panel, ...]
    draw: Callable[[float], Scene] | None = None
    notes: tuple[str, ...] = ()
    is_gallery: bool = False


@dataclass(frozen=True, kw_only=True)
class DrawingLimits:
    """The largest sizes of a drawing, beyond which parts are left out."""

    width: int  # In characters.
    grid: tuple[int, int]  # (rows, columns) of a grid.
    tile: int  # Rows, and columns, of a grid in a gallery.
    lines: int  # Lines of a table whose columns continue below it because it is too wide.


def limit_panels(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """Return at most `MAX_PANELS` panels: the first ones and the last one, whose caption says how many are left out."""
    if len(panels) <= MAX_PANELS:
        return tuple(panels)
    kept, last = panels[: MAX_PANELS // 2], panels[-1]
    return (*kept, replace(last, caption=f"{_left_out(len(panels) - len(kept) - 1)} {last.caption}"))


def scene_of(sketch: Sketch, limits: DrawingLimits) -> Scene:
    """Convert a sketch to a scene. Grids that exceed the limits lose their middle rows and columns."""
    drawn = [_panel(panel, limits, is_tile=sketch.is_gallery) for panel in sketch.panels]
    body = [flow(drawn, min(limits.width, _GALLERY))] if sketch.is_gallery and drawn else drawn
    body = [*body, *([sketch.draw(limits.width)] if sketch.draw else [])]
    notes = [stack(paragraph(note, limits.width) for note in sketch.notes)] if sketch.notes else []
    return stack([paragraph(sketch.title, limits.width, is_bold=True), *body, *notes], gap=1)


def _panel(panel: Panel, limits: DrawingLimits, *, is_tile: bool) -> Scene:
    """Return a panel as a scene: its caption above; its notes on the right, or below if it is wide or `is_tile`."""
    if panel.frame == "table":
        drawn = _table(panel, limits)
    elif is_tile and panel.cell_width:  # All tiles are of one size already.
        drawn = _grid(panel)
    else:
        drawn = _grid(_elide_grid(panel, *((limits.tile, limits.tile) if is_tile else limits.grid), limits.width))
    above = [paragraph(panel.caption, limits.width)] if panel.caption or is_tile else []
    notes = stack(paragraph(note, limits.width) for note in panel.notes)
    if is_tile or drawn.width + 4 + notes.width > limits.width:
        return stack((*above, drawn, notes))
    # Next to the first row of cells.
    return stack((*above, together((drawn, moved(notes, drawn.width + 4, 1 + any(panel.columns))))))


def _grid(panel: Panel) -> Scene:
    """Return a `ruled` or `linked` panel as a scene: cells of equal size, with rules around them or lines for links."""
    is_ruled = panel.frame == "ruled"
    num_rows, num_columns, pitch, height = len(panel.cells), len(panel.cells[0]), panel.pitch, panel.cell_height + 1
    # A rule takes up a character or a line, and is in its middle. Chips leave space for wraparound links.
    rule, edge, room = (1, "ruled", 0) if is_ruled else (0, "outlined", 2)
    wide, high = (pitch, height) if is_ruled else (panel.column_width, 1)
    left, top = panel.label_width + room, any(panel.columns) + (panel.wraps[0] and not is_ruled)
    items: list[Box | Line | Label] = [
        Box(left + rule + column * pitch, 0, panel.column_width, 1, label)
        for column, label in enumerate(panel.columns)
        if label
    ]
    items += [
        Label(0, top + rule + row * height + (panel.cell_height - 1) // 2, label)
        for row, label in enumerate(panel.rows)
        if label
    ]
    items += [] if is_ruled else _links(left, top, panel)
    for row, cells in enumerate(panel.cells):
        for column, cell in enumerate(cells):
            x, y = left + column * pitch + rule / 2, top + row * height + rule / 2
            items.append(Box(x, y, wide, high, cell.text, cell.fill, cell.hint, edge))
            if cell.is_marked:
                items.append(Box(x + 0.5, y + 0.5, wide - 1, high - 1, f"›{cell.text}", cell.fill, cell.hint, "marked"))
    bottom = top + num_rows * height + (1 if is_ruled else panel.wraps[0] - 1)
    behind = len(panel.sheets)
    sheets = _sheets(panel.sheets, left + 0.5, top + 0.5, num_columns * pitch, num_rows * height)
    return Scene(left + num_columns * pitch + rule + _SHIFT * behind, bottom + behind, (*sheets, *items))


_SHIFT = 2  # Characters by which each sheet is further to the right than the one in front of it.


def _sheets(fills: Sequence[str], x: float, y: float, width: float, height: float) -> list[Box | Line]:
    """Return the shapes of sheets behind a grid, each further down and right than the one in front of it.

    Images show the whole sheets, text only their edges. x, y, width, height: position and size of the grid.
    """
    items: list[Box | Line] = [
        Box(x + _SHIFT * place, y + place, width, height, fill=fill, edge="sheet")
        for place, fill in reversed(list(enumerate(fills, start=1)))
    ]
    for place in range(1, len(fills) + 1):
        right, low, start = x + width + _SHIFT * place, y + height + place, x + _SHIFT * place
        items += [
            Line(right - _SHIFT, y + place, _SHIFT, 0),
            Line(right, y + place, 0, height),
            Line(start, low, width, 0),
            Line(start, low - 1, 0, 1),
        ]
    return items


def _links(left: float, top: float, panel: Panel) -> list[Line]:
    """Draw a line from each chip to its neighbours, dashed for wraparound links, faint for unused ones."""
    lines: list[Line] = []
    middle, pitch, last_row, last = panel.column_width / 2, panel.pitch, len(panel.cells) - 1, len(panel.cells[0]) - 1
    for row, cells in enumerate(panel.cells):
        for column, cell in enumerate(cells):
            x, y = left + column * pitch, top + 2 * row
            across, down = (not used for used in cell.links)
            if column < last:
                lines.append(Line(x + middle, y + 0.5, pitch, 0, is_faint=across))
            elif panel.wraps[1]:
                ends = (left - 2, x + panel.column_width)
                lines += [Line(end, y + 0.5, 2, 0, is_dashed=True, is_faint=across) for end in ends]
            if row < last_row:
                lines.append(Line(x + middle, y + 0.5, 0, 2, is_faint=down))
            elif panel.wraps[0]:
                ends = (top - 1, y + 1)
                lines += [Line(x + middle, end, 0, 1, is_dashed=True, is_faint=down) for end in ends]
    return lines


def _table(panel: Panel, limits: DrawingLimits) -> Scene:
    """Return a table as a scene. Columns beyond the width of the drawing continue below the first ones, in parts.

    If there are too many parts, those in the middle are left out.
    """
    columns = list(zip(*panel.cells, strict=True))
    labels = panel.columns or ("",) * len(columns)
    # A label without a neighbour may extend over the next column.
    heads = [len(label) if after else 0 for label, after in zip(labels, (*labels[1:], "end"), strict=True)]
    widths = [
        max(panel.cell_width, head, *(len(cell.text) for cell in column if cell.span == 1)) + 2
        for head, column in zip(heads, columns, strict=True)
    ]
    parts, room = [[0]], limits.width - panel.label_width - widths[0]
    for number in range(1, len(columns)):
        room -= widths[number]
        # The space at the right of the last cell may be outside of the width.
        if room < -1:
            parts.append([])
            room = limits.width - panel.label_width - widths[number]
        parts[-1].append(number)
    drawn = [_columns(panel, labels, widths, part) for part in parts]
    most = max(3, limits.lines // (len(panel.cells) + 2))
    if len(drawn) > most:
        kept, cut = most - 1, parts[most - 1 : -1]
        left_out = paragraph(_left_out(sum(map(len, cut))), limits.width)
        drawn = [*drawn[:kept], left_out, drawn[-1]]
    return stack(drawn, gap=1)


def _columns(panel: Panel, labels: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> Scene:
    """Return some columns of a table, with the labels of its rows, as a scene; shown: the indices of the columns."""
    left, top = panel.label_width, any(panel.columns)
    items: list[Box | Line | Label] = [Label(0, top + row, label) for row, label in enumerate(panel.rows)]
    if panel.row_fills:
        filled = enumerate(zip(panel.rows, panel.row_fills, strict=True))
        items = [Box(0, top + row, left - 1, 1, label.ljust(left - 1), fill) for row, (label, fill) in filled]
    x = left
    for number in shown:
        if labels[number]:
            items.append(Label(x + 1, 0, labels[number]))
        for row, cells in enumerate(panel.cells):
            cell = cells[number]
            if not cell.span and number - 1 in shown:
                continue  # A cell on its left covers it.
            edge = "marked" if cell.is_marked else "none"
            covered = [place for place in range(number, number + max(cell.span, 1)) if place in shown]
            wide = sum(widths[place] for place in covered)
            text = cell.text if len(covered) >= cell.span else cell.text[: wide - 2].rstrip()
            items.append(Box(x, top + row, wide, 1, text, cell.fill, cell.hint, edge, is_left=True))
        x += widths[number]
    # Marked cells are last, so that no other cell is drawn over their edges.
    items.sort(key=lambda item: isinstance(item, Box) and item.edge == "marked")
    return Scene(x, top + len(panel.cells), tuple(items))


def _elide_grid(panel: Panel, max_rows: int, max_columns: int, width: int) -> Panel:
    """Return a panel of at most `max_rows`, `max_columns` and `width`; `…` replaces rows and columns in the middle."""
    ends = 1 if panel.frame == "ruled" else 2 + 2 * panel.wraps[1]
    max_columns = min(max_columns, max(3, (width - panel.label_width - ends) // panel.pitch))
    cells = [_elide(row, max_columns, Cell(ELLIPSIS)) for row in panel.cells]
    gap_row = (Cell(ELLIPSIS),) * len(cells[0])
    return replace(
        panel,
        cells=_elide(cells, max_rows, gap_row),
        rows=_elide(panel.rows, max_rows, ELLIPSIS),
        columns=_elide(panel.columns, max_columns, ELLIPSIS),
    )


def _elide(items: Sequence[Item], most: int, gap: Item) -> tuple[Item, ...]:
    """Return at most `most` items: `gap` replaces those in the middle."""
    if len(items) <= most:
        return tuple(items)
    last = max(1, (most - 1) // 3)
    return (*items[: most - 1 - last], gap, *items[-last:])


def _left_out(count: int) -> str:
    return f"{ELLIPSIS} {count} left out {ELLIPSIS}"
