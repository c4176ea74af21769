"""A self-contained HTML document of sections: it loads nothing and runs no script.

Content wider than the window scrolls within its section. All text is escaped. A content security policy in the head
forbids loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.pictures import svg
from meshwright.pictures.scene import Scene

WIDTH = 132
"""Width of drawings in characters: they are as wide as the page."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #666; --line: #e8e8e8; --page: #fff; --wrong: #c0392b;
  --differs: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --quiet: #a0a0a0; --line: #3a3a3a; --page: #161616; --wrong: #e8796b;
    --differs: #e0b060; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1060px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .quiet { color: var(--quiet); }
.wide { overflow-x: auto; } pre { font: 13px/1.35 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } td.text, th.text { text-align: left; white-space: normal; }
td:first-child, th:first-child { padding-left: 0; } td.text:first-child { white-space: nowrap; }
td.text:last-child { min-width: 18rem; } tr.differs td { color: var(--differs); }
svg { display: block; } svg text { fill: var(--ink); } a { color: inherit; }
.key { display: inline-block; margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; vertical-align: -.05em; }
.charts { display: flex; flex-wrap: wrap; gap: .5rem 1rem; } .chart { margin: 0; max-width: 100%; overflow-x: auto; }
.chart figcaption { color: var(--quiet); margin: .4rem 0 .1rem; } .chart svg text { fill: var(--quiet); }
.finding { border-left: 3px solid var(--wrong); padding: .2rem .8rem; margin: .7rem 0; }
.wrong { color: var(--wrong); font-weight: 600; } code { font-size: .92em; overflow-wrap: anywhere; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Section:
    """A part of a page. title: its heading, or ''. body: HTML, in which text is escaped."""

    title: str
    body: str


def render(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the document: title, subtitle lines, and the sections that have a body."""
    under = "\n".join(f'<p class="quiet">{escape(line)}</p>' for line in lines)
    parts = "\n".join(
        f"<section>\n{f'<h2>{escape(part.title)}</h2>' if part.title else ''}\n{part.body}\n</section>"
        for part in sections
        if part.body
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{under}\n{parts}\n</body>\n</html>\n"
    )


def drawing(scene: Scene) -> str:
    """Return a scene as HTML."""
    return f'<div class="wide">\n{svg.element(scene)}</div>\n'


def legend(colours: Mapping[str, str]) -> str:
    """Return a legend: a square and a name for each colour."""
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f"<p>{' '.join(keys)}</p>\n"


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Sequence[int] = (0,),
    differs: Sequence[bool] = (),
) -> str:
    """Return an HTML table without empty columns, which scrolls if it is too wide; '' without rows.

    text: indices of columns with text. differs: for each row, whether it is marked.
    """
    if not rows:
        return ""
    shown = [index for index in range(len(columns)) if any(row[index] not in ("", "–") for row in rows)]

    def line(cells: Sequence[str], tag: str, *, is_marked: bool = False) -> str:
        marked = (
            f"<{tag}{' class=' + chr(34) + 'text' + chr(34) if index in text else ''}>{escape(cells[index])}</{tag}>"
            for index in shown
        )
        return f"<tr{' class=' + chr(34) + 'differs' + chr(34) if is_marked else ''}>{''.join(marked)}</tr>"

    marks = differs or (False,) * len(rows)
    body = "\n".join(line(row, "td", is_marked=is_marked) for row, is_marked in zip(rows, marks, strict=True))
    table = f"<table>\n<thead>{line(columns, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="wide">\n{table}\n</div>'
