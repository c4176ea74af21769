"""A picture: sketches one below the other, as text, as SVG, as a page, and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.pictures import svg, terminal
from meshwright.pictures.colours import INK
from meshwright.pictures.document import Section, drawing, render
from meshwright.pictures.panels import DrawingLimits, Sketch, scene_of
from meshwright.pictures.scene import Scene, moved, stack
from meshwright.support.files import write_file

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

WIDTH = 100
"""Width of pictures in characters where there is no terminal."""

_DOCUMENT = DrawingLimits(width=240, grid=(64, 64), tile=64, lines=1024)
_MARGIN = 2  # Spaces at the left of each line of text.


@dataclass(frozen=True, repr=False)
class Picture:
    """Sketches one below the other. `print` shows text without colours; rich's `print` and notebooks show colours."""

    sketches: tuple[Sketch, ...]

    @property
    def title(self) -> str:
        """The titles of the sketches, joined by semicolons."""
        return "; ".join(sketch.title for sketch in self.sketches)

    def svg(self, file: str | Path | None = None) -> str:
        """Return the picture as a standalone SVG document; file: also write it to this file."""
        notes = [note for sketch in self.sketches for panel in sketch.panels for note in panel.notes]
        notes += [note for sketch in self.sketches for note in sketch.notes]
        words = ". ".join(dict.fromkeys(notes))
        drawn = svg.document(self._scene(_DOCUMENT, gap=2), title=self.title, description=words)
        if file is not None:
            write_file(file, drawn)
        return drawn

    def html(self, file: str | Path | None = None) -> str:
        """Return the picture as a self-contained HTML page; file: also write it to this file."""
        page = render(self.title, (), [self.section()])
        if file is not None:
            write_file(file, page)
        return page

    def section(self) -> Section:
        """Return the picture as a section of an HTML page."""
        return Section("", drawing(self._scene(_DOCUMENT, gap=2)))

    def text(self, width: int = WIDTH, *, is_ascii: bool = False) -> str:
        """Return the picture as text of at most `width` characters per line, without colours."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self._lines(width, is_ascii))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        # An interactive prompt shows the picture itself.
        return str(self)

    def _repr_html_(self) -> str:
        """Return the picture as SVG, for notebooks."""
        return self.svg()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Render for rich at the terminal's width, in colour if supported, in ASCII if it cannot show Unicode."""
        from rich.text import Text

        width = options.max_width if console.is_terminal else WIDTH
        for line in self._lines(width, options.ascii_only):
            text = Text(no_wrap=True, overflow="ignore")
            for piece in line:
                text.append(piece.text, piece.fill and f"{INK} on {piece.fill}")
            if console.color_system is None:
                text.rstrip()
            yield text

    def _lines(self, width: int, is_ascii: bool) -> list[tuple[terminal.Span, ...]]:
        limits = DrawingLimits(width=width - _MARGIN, grid=(10, width), tile=8, lines=72)
        return terminal.lines_of(moved(self._scene(limits, gap=1), _MARGIN, 0), is_ascii=is_ascii)

    def _scene(self, limits: DrawingLimits, *, gap: int) -> Scene:
        return stack([scene_of(sketch, limits) for sketch in self.sketches], gap=gap)
