"""A picture: text in a terminal, with colours if it has them; SVG in a notebook or a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.viz import svg, terminal
from meshwright.viz.colours import INK, fill
from meshwright.viz.sketch import Sketch

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@dataclass(frozen=True, repr=False)
class Picture:
    """Sketches one below the other. `print` shows plain text; rich's `print` and notebooks show colours."""

    sketches: tuple[Sketch, ...]

    @property
    def svg(self) -> str:
        """The picture as a standalone SVG document."""
        return svg.render(self.sketches)

    def __str__(self) -> str:
        return terminal.text_of(self._lines(terminal.WIDTH))

    def __repr__(self) -> str:
        # What a prompt echoes is the picture itself.
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self.svg

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """For rich: the terminal's width, and colours only if it has them."""
        from rich.text import Text

        width = min(options.max_width, terminal.WIDTH) if console.is_terminal else terminal.WIDTH
        for line in self._lines(width):
            text = Text(no_wrap=True, overflow="ignore")
            for piece in line:
                text.append(piece.text, None if piece.colour is None else f"{INK} on {fill(piece.colour)}")
            yield text

    def _lines(self, width: int) -> terminal.Block:
        """The lines of all sketches, separated by empty lines."""
        lines: terminal.Block = []
        for sketch in self.sketches:
            lines += [*([()] if lines else []), *terminal.render(sketch, width)]
        return lines
