"""Write scenes as SVG: a standalone document, or an element of an HTML page."""

from __future__ import annotations

from functools import partial
from html import escape as escape_html

from meshwright.pictures.colours import INK, RULE, WRONG
from meshwright.pictures.scene import Box, Edge, Label, Line, Scene, moved

# `xml.sax.saxutils.escape` would import urllib, which takes longer than printing most answers.
escape = partial(escape_html, quote=False)

_FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_SIZE = 13
_CHARACTER = 0.61 * _SIZE  # A little more than the width of a character of these fonts.
_LINE = 20
_BASE = 0.7  # The base line of letters, as a fraction of a line's height.

_EDGES: dict[Edge, str] = {
    "none": "",
    "ruled": f' stroke="{RULE}"',
    "outlined": f' stroke="{RULE}"',
    "marked": f' stroke="{INK}" stroke-width="2"',
    "exposed": f' stroke="{WRONG}" stroke-width="1.5"',
    "sheet": f' stroke="{RULE}"',
}


def document(scene: Scene, *, title: str, description: str) -> str:
    """Return a standalone SVG document on white."""
    framed = moved(scene, 2.5, 1)
    words = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n"
    whole = Scene(framed.width + 2.5, framed.height + 1, framed.items)
    drawn = element(whole, f'{words}<rect width="100%" height="100%" fill="#ffffff"/>\n')
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def element(scene: Scene, before: str = "") -> str:
    """Return the `svg` element of a scene. The page's style determines the colour of text without a box.

    before: SVG to draw before the scene.
    """
    width, height = round(scene.width * _CHARACTER), round(scene.height * _LINE)
    body = "\n".join(map(_item, scene.items))
    return (
        f'<svg role="img" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="{_FONT}" font-size="{_SIZE}" fill="{INK}">\n'
        f"{before}{body}\n</svg>\n"
    )


def _item(item: Box | Line | Label) -> str:
    if isinstance(item, Box):
        return _box(item)
    x, y = item.x * _CHARACTER, item.y * _LINE
    if isinstance(item, Label):
        return _text(item.text, x, y + _BASE * _LINE, "start", ' font-weight="bold"' if item.is_bold else "")
    dashes = ' stroke-dasharray="4 3"' if item.is_dashed else ""
    dashes += ' stroke-opacity="0.25"' if item.is_faint else ""
    x2, y2 = x + item.width * _CHARACTER, y + item.height * _LINE
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{item.colour or RULE}"{dashes}/>'


def _box(box: Box) -> str:
    """Return a box as SVG: its fill and border, its text, and its tooltip."""
    x, y, width, height = box.x * _CHARACTER, box.y * _LINE, box.width * _CHARACTER, box.height * _LINE
    drawn = [f"<title>{escape(box.hint)}</title>"] if box.hint else []
    background = box.fill or ("#ffffff" if box.edge in ("ruled", "outlined") else None)
    edge = _EDGES[box.edge] or (' stroke="#ffffff"' if box.fill and height >= _LINE else "")
    if background or edge:
        drawn.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
            f' fill="{background or "none"}"{edge}/>'
        )
    if box.text:
        ink = f' style="fill:{INK}"' if background else ""
        at, anchor = (x + _CHARACTER, "start") if box.is_left else (x + width / 2, "middle")
        drawn.append(_text(box.text, at, y + height / 2 + (_BASE - 0.5) * _LINE, anchor, ink))
    return f"<g>{''.join(drawn)}</g>" if len(drawn) > 1 else "".join(drawn)


def _text(text: str, x: float, y: float, anchor: str, more: str) -> str:
    """Return a `text` element whose start, middle or end (`anchor`) is at a point of its base line; spaces are kept."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more} xml:space="preserve">{escape(text)}</text>'
