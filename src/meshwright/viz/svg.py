"""Sketches as a standalone SVG document, without dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from meshwright.viz.colours import INK, fill
from meshwright.viz.sketch import Cell, Panel, Sketch, elide

_FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_SIZE = 13
_CHAR = 0.61 * _SIZE  # the advance of a character of these fonts, and a little more
_LINE = 20
_ROW = 26
_GAP = 20
_MAX_WIDTH = 980
_MAX_CELLS = 64  # rows and columns
_RULE = "#555555"


@dataclass(frozen=True)
class Box:
    """A drawing with its top left corner at 0, 0."""

    body: str
    width: float
    height: float


def render(sketches: Sequence[Sketch]) -> str:
    """The SVG document of some sketches, one below the other."""
    content = _stack([_sketch(sketch) for sketch in sketches], gap=2 * _GAP)
    width, height = round(content.width + 2 * _GAP), round(content.height + 2 * _GAP)
    title = "; ".join(sketch.title for sketch in sketches)
    notes = [note for sketch in sketches for panel in sketch.panels for note in panel.notes]
    notes += [note for sketch in sketches for note in sketch.notes]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family={quoteattr(_FONT)} font-size="{_SIZE}" fill="{INK}">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape('. '.join(dict.fromkeys(notes)))}</desc>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        f"{_at(content, _GAP, _GAP)}\n</svg>\n"
    )


def _sketch(sketch: Sketch) -> Box:
    panels = [_panel(elide(panel, max_rows=_MAX_CELLS, max_columns=_MAX_CELLS)) for panel in sketch.panels]
    body = _flow(panels) if sketch.is_gallery else _stack(panels, gap=_GAP)
    title = _text_line(sketch.title, weight="bold")
    return _stack([title, body, *([_notes(sketch.notes)] if sketch.notes else [])], gap=_GAP / 2)


def _panel(panel: Panel) -> Box:
    above = [_text_line(panel.caption)] if panel.caption else []
    below = [_notes(panel.notes)] if panel.notes else []
    return _stack([*above, _grid(panel), *below], gap=4)


def _notes(notes: Sequence[str]) -> Box:
    return _stack([_text_line(note) for note in notes], gap=0)


def _grid(panel: Panel) -> Box:
    apart = _GAP if panel.frame == "linked" else 0
    # As with widths below: a rule takes a line in the terminal, so panels of one gallery come out alike.
    widths, height = _widths(panel), _ROW * (panel.cell_height + 1) / 2
    left = max((len(label) for label in panel.rows), default=0) * _CHAR + (10 if panel.rows else 0)
    left += apart
    top = (_LINE if any(panel.columns) else 0) + apart
    xs = [left + sum(widths[:index]) + apart * index for index in range(len(widths))]
    ys = [top + (height + apart) * index for index in range(len(panel.cells))]
    body = [
        _text(label, x + w / 2, _LINE - 6, "middle") for label, x, w in zip(panel.columns, xs, widths, strict=False)
    ]
    body += [_text(label, 0, y + height / 2 + 5) for label, y in zip(panel.rows, ys, strict=False)]
    if panel.frame == "linked":
        body += _links(panel, xs, ys, widths[0], height)
    for y, row in zip(ys, panel.cells, strict=True):
        body += [_cell(cell, x, y, w, height, panel) for cell, x, w in zip(row, xs, widths, strict=True)]
    return Box("\n".join(body), xs[-1] + widths[-1] + apart, ys[-1] + height + apart)


def _widths(panel: Panel) -> list[float]:
    """The width of each column: equal in a grid, individual in a table."""
    if panel.frame != "open":
        # A rule takes a character in the terminal.
        return [(panel.column_width + 1) * _CHAR] * len(panel.cells[0])
    labels = panel.columns or ("",) * len(panel.cells[0])
    columns = zip(labels, zip(*panel.cells, strict=True), strict=True)
    return [(max(len(label), *(len(cell.text) for cell in column)) + 2) * _CHAR for label, column in columns]


def _cell(cell: Cell, x: float, y: float, width: float, height: float, panel: Panel) -> str:
    """A cell with its tooltip."""
    background = fill(cell.colour) if cell.colour is not None else "none" if panel.frame == "open" else "#ffffff"
    rule = "none" if panel.frame == "open" and cell.colour is None else _RULE
    stroke = 2.5 if cell.is_marked else 1
    hint = f"<title>{escape(cell.hint)}</title>" if cell.hint else ""
    rect = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{background}"'
        f' stroke="{rule}" stroke-width="{stroke}"/>'
    )
    return f"<g>{hint}{rect}{_text(cell.text, x + width / 2, y + height / 2 + 5, 'middle')}</g>"


def _links(panel: Panel, xs: Sequence[float], ys: Sequence[float], width: float, height: float) -> list[str]:
    """A line through each row and column of chips; dashed at both ends where it closes into a ring."""
    down, across = panel.wraps
    first, last = xs[0], xs[-1] + width
    lines: list[str] = []
    for y in (y + height / 2 for y in ys):
        lines.append(_line(first, y, last, y))
        lines += [_line(first - _GAP, y, first, y, dashed=True), _line(last, y, last + _GAP, y, dashed=True)] * across
    first, last = ys[0], ys[-1] + height
    for x in (x + width / 2 for x in xs):
        lines.append(_line(x, first, x, last))
        lines += [_line(x, first - _GAP, x, first, dashed=True), _line(x, last, x, last + _GAP, dashed=True)] * down
    return lines


def _line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_RULE}"{dashes}/>'


def _text(text: str, x: float, y: float, anchor: str = "start", weight: str = "normal") -> str:
    """A text at a point of its base line; spaces are kept."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" xml:space="preserve">'
        f"{escape(text)}</text>"
    )


def _text_line(text: str, weight: str = "normal") -> Box:
    return Box(_text(text, 0, _LINE - 6, weight=weight), len(text) * _CHAR, _LINE)


def _at(box: Box, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">\n{box.body}\n</g>'


def _stack(boxes: Sequence[Box], *, gap: float) -> Box:
    """Drawings one below the other."""
    body, y = [], 0.0
    for box in boxes:
        body.append(_at(box, 0, y))
        y += box.height + gap
    return Box("\n".join(body), max(box.width for box in boxes), y - gap)


def _flow(boxes: Sequence[Box]) -> Box:
    """Drawings side by side in columns of equal width, in as many rows as needed."""
    column = max(box.width for box in boxes) + _GAP
    across = max(1, int(_MAX_WIDTH // column))
    rows = []
    for start in range(0, len(boxes), across):
        row = boxes[start : start + across]
        body = "\n".join(_at(box, index * column, 0) for index, box in enumerate(row))
        rows.append(Box(body, column * len(row), max(box.height for box in row)))
    return _stack(rows, gap=_GAP)
