"""A self-contained HTML document made of sections: it loads nothing and runs no script.

What is wider than the window scrolls within its section.
Every text is escaped. A content security policy in the head forbids the page to load anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.viz import svg
from meshwright.viz.scene import Scene

WIDTH = 132
"""Characters of a drawing: what the page is wide."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #666; --line: #e8e8e8; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --quiet: #a0a0a0; --line: #3a3a3a; --page: #161616; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1060px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .quiet { color: var(--quiet); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } td.text, th.text { text-align: left; white-space: normal; }
td.text:first-child { white-space: nowrap; }
svg { display: block; } svg text { fill: var(--ink); }
.finding { border-left: 3px solid #c0392b; padding: .2rem .8rem; margin: .7rem 0; } code { font-size: .92em; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Section:
    """A part of a page: title, and body as escaped HTML."""

    title: str
    body: str


def render(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """The document: title, subtitle lines, and the sections that have a body."""
    under = "\n".join(f'<p class="quiet">{escape(line)}</p>' for line in lines)
    parts = "\n".join(
        f"<section>\n<h2>{escape(part.title)}</h2>\n{part.body}\n</section>" for part in sections if part.body
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{under}\n{parts}\n</body>\n</html>\n"
    )


def drawing(scene: Scene) -> str:
    """A scene as a part of a page."""
    return f'<div class="wide">\n{svg.element(scene)}</div>\n'


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)) -> str:
    """A table without its empty columns; columns are numeric except those in `text`. Empty without rows."""
    if not rows:
        return ""
    shown = [index for index in range(len(columns)) if any(row[index] not in ("", "–") for row in rows)]

    def line(cells: Sequence[str], tag: str) -> str:
        marked = (
            f"<{tag}{' class=' + chr(34) + 'text' + chr(34) if index in text else ''}>{escape(cells[index])}</{tag}>"
            for index in shown
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    table = f"<table>\n<thead>{line(columns, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="wide">\n{table}\n</div>'
