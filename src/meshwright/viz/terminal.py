"""Sketches as lines of text: plain Unicode, with a colour for each shard where the terminal has colours."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.viz.sketch import Cell, Panel, Sketch, elide

WIDTH = 100
"""Most columns of a picture, if its cells can be elided to fit."""

_MAX_ROWS = 10
_MAX_TILE = 8  # rows and columns of a panel in a gallery
_MARGIN = "  "


class Piece(NamedTuple):
    """A run of text and its colour number."""

    text: str
    colour: int | None = None


Line = tuple[Piece, ...]
Block = list[Line]


def render(sketch: Sketch, width: int = WIDTH) -> Block:
    """The lines of a sketch, within `width` columns where eliding makes that possible."""
    lines: Block = [_plain(sketch.title), ()]
    inside = width - len(_MARGIN)
    if sketch.is_gallery:
        lines += _flow([_tile(panel) for panel in sketch.panels], inside)
    for panel in () if sketch.is_gallery else sketch.panels:
        lines += [*_panel(panel, inside), ()]
    lines += [_plain(note) for note in sketch.notes]
    while lines and not lines[-1]:
        lines.pop()
    return [_trimmed((Piece(_MARGIN), *line)) for line in lines]


def text_of(lines: Block) -> str:
    """The lines as plain text."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def _panel(panel: Panel, width: int) -> Block:
    """A panel fitted to a width: caption above, notes beside it, or below where there is no space."""
    room = width - _label_width(panel) - 4
    if panel.frame != "open":
        columns = max(3, room // (panel.column_width + 1))
        panel = elide(panel, max_rows=_MAX_ROWS, max_columns=columns)
    block = _draw(panel)
    notes = [_plain(note) for note in panel.notes]
    gap = 4
    if notes and _width(block) + gap + max(_width([note]) for note in notes) <= width:
        start = 1 + any(map(bool, panel.columns))  # beside the first row of cells
        block = _beside([block, [()] * start + notes], gap)
    else:
        block += notes
    return ([_plain(panel.caption)] if panel.caption else []) + block


def _tile(panel: Panel) -> Block:
    """A panel of a gallery: small, caption above and notes below."""
    drawn = _draw(elide(panel, max_rows=_MAX_TILE, max_columns=_MAX_TILE) if not panel.cell_width else panel)
    return [_plain(panel.caption), *drawn, *(_plain(note) for note in panel.notes), ()]


def _flow(tiles: list[Block], width: int) -> Block:
    """Tiles side by side, in as many rows as needed."""
    gap = 3
    column = max(_width(tile) for tile in tiles)
    across = max(1, (width + gap) // (column + gap))
    lines: Block = []
    for start in range(0, len(tiles), across):
        row = [_padded(tile, column) for tile in tiles[start : start + across]]
        lines += _beside(row, gap)
    return lines


def _draw(panel: Panel) -> Block:
    draw = {"ruled": _ruled, "open": _open, "linked": _linked}[panel.frame]
    return draw(panel)


def _ruled(panel: Panel) -> Block:
    """Cells in a grid with rules."""
    width, count = panel.column_width, len(panel.cells[0])
    rules = [left + middle.join(["─" * width] * count) + right for left, middle, right in ("┌┬┐", "├┼┤", "└┴┘")]
    lines = _header(panel, width)
    for index, row in enumerate(panel.cells):
        lines.append(_labelled(panel, None, Piece(rules[1 if index else 0])))
        for line in range(panel.cell_height):
            is_text = line == (panel.cell_height - 1) // 2
            pieces = [(Piece((cell.text if is_text else "").center(width), cell.colour),) for cell in row]
            lines.append(_labelled(panel, index if is_text else None, *_join(pieces, "│", "│", "│")))
    return [*lines, _labelled(panel, None, Piece(rules[2]))]


def _linked(panel: Panel) -> Block:
    """Chips with a line for every link; dotted ends close a ring."""
    width, count = panel.column_width, len(panel.cells[0])
    down, across = panel.wraps
    end = "╌" if across else " "
    between, outside = (_labelled(panel, None, Piece(" " + " ".join([sign.center(width)] * count))) for sign in "│┆")
    lines = _header(panel, width) + ([outside] if down else [])
    for index, row in enumerate(panel.cells):
        chips = [_chip(cell, width, column > 0, column < count - 1) for column, cell in enumerate(row)]
        lines += [between] if index else []
        lines.append(_labelled(panel, index, *_join(chips, end, "─", end)))
    return lines + ([outside] if down else [])


def _chip(cell: Cell, width: int, is_linked_left: bool, is_linked_right: bool) -> Line:
    """A chip centred in its column, with its part of the links to its neighbours."""
    before, _, after = cell.text.center(width).partition(cell.text)
    left, right = ("─" if is_linked else " " for is_linked in (is_linked_left, is_linked_right))
    return Piece(left * len(before)), Piece(cell.text, cell.colour), Piece(right * len(after))


def _open(panel: Panel) -> Block:
    """Cells in columns as wide as needed; a marked cell has a pointer before it."""
    columns = list(zip(*panel.cells, strict=True))
    labels = panel.columns or ("",) * len(columns)
    widths = [
        max(len(label), *(len(_marked(cell)) for cell in column)) for label, column in zip(labels, columns, strict=True)
    ]
    lines: Block = []
    if panel.columns:
        header = "  ".join(label.ljust(width) for label, width in zip(labels, widths, strict=True))
        lines.append(_labelled(panel, None, Piece(header)))
    for index, row in enumerate(panel.cells):
        pieces = [(Piece(_marked(cell).ljust(width), cell.colour),) for cell, width in zip(row, widths, strict=True)]
        lines.append(_labelled(panel, index, *_join(pieces, "", "  ", "")))
    return lines


def _marked(cell: Cell) -> str:
    """The text of a cell, a pointer before it where it is marked."""
    return f"›{cell.text}" if cell.is_marked else cell.text


def _header(panel: Panel, width: int) -> Block:
    """The line of column labels, if any is not empty."""
    if not any(panel.columns):
        return []
    return [_labelled(panel, None, Piece(" " + " ".join(label.center(width) for label in panel.columns)))]


def _labelled(panel: Panel, row: int | None, *pieces: Piece) -> Line:
    """A line with the label of a row, or the space for one, before it."""
    label = panel.rows[row] if panel.rows and row is not None else ""
    width = _label_width(panel)
    return (Piece(label.ljust(width) + " " * bool(width)), *pieces)


def _label_width(panel: Panel) -> int:
    """The characters of the longest row label."""
    return max((len(label) for label in panel.rows), default=0)


def _join(cells: list[Line], left: str, between: str, right: str) -> Line:
    """The cells of a row with something before, between and after them."""
    line: Line = (Piece(left),)
    for index, cell in enumerate(cells):
        line += ((Piece(between),) if index else ()) + cell
    return (*line, Piece(right))


def _trimmed(line: Line) -> Line:
    """The line without blanks at its end, unless they have a colour."""
    while line and line[-1].colour is None:
        text = line[-1].text.rstrip()
        if text:
            return (*line[:-1], Piece(text))
        line = line[:-1]
    return line


def _plain(text: str) -> Line:
    """A line of one text."""
    return (Piece(text),) if text else ()


def _width(block: Block) -> int:
    """The characters of the longest line."""
    return max((sum(len(piece.text) for piece in line) for line in block), default=0)


def _padded(block: Block, width: int) -> Block:
    """The block with every line filled up to a width."""
    return [(*line, Piece(" " * (width - _width([line])))) for line in block]


def _beside(blocks: list[Block], gap: int) -> Block:
    """Blocks side by side, aligned at the top."""
    height = max(len(block) for block in blocks)
    filled = [_padded([*block, *[()] * (height - len(block))], _width(block) + gap) for block in blocks]
    return [tuple(piece for block in filled for piece in block[index]) for index in range(height)]
