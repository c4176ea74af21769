"""Base classes of answers, which print the same screen as text, in a notebook and on an HTML page."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.pictures.document import Section, render
from meshwright.pictures.picture import Picture
from meshwright.support.files import write_file


class Answer(ABC):
    """An answer to a command, such as `meshwright chips`. `str`, notebooks and HTML show what the command prints."""

    @abstractmethod
    def print(self) -> None:
        """Print the output of the command, as wide as the terminal."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, in the schema of the command's --json."""

    def __str__(self) -> str:
        with redirect_stdout(io.StringIO()) as out:
            self.print()
        return out.getvalue().rstrip()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the printed output as HTML, for notebooks."""
        return f'<pre style="line-height:1.3">{escape(str(self))}</pre>'

    def html(self, file: str | Path | None = None) -> str:
        """Return the printed output as a self-contained HTML page; file: also write it to this file."""
        title, _, screen = str(self).partition("\n")
        page = render(
            title, (), [*self._pictures(), Section("", f'<div class="wide"><pre>{escape(screen)}</pre></div>')]
        )
        if file is not None:
            write_file(file, page)
        return page

    def _pictures(self) -> list[Section]:
        """Return the sections that an HTML page shows above the printed output."""
        return []


class DrawnAnswer(Answer):
    """An answer with a picture."""

    @property
    @abstractmethod
    def picture(self) -> Picture:
        """The picture. Raises if it would have too many devices."""

    def svg(self, file: str | Path | None = None) -> str:
        """Return the picture as a standalone SVG document; also write it to `file` if given."""
        return self.picture.svg(file)

    def _repr_html_(self) -> str:
        """Return the printed output, and the picture if it can be drawn, as HTML for notebooks."""
        drawn = "".join(f'<div style="overflow-x:auto">{found.svg()}</div>' for found in self._drawn())
        return super()._repr_html_() + drawn

    def _pictures(self) -> list[Section]:
        return [found.section() for found in self._drawn()]

    def _drawn(self) -> list[Picture]:
        """Return a list with the picture; [] if the picture would have too many devices."""
        try:
            return [self.picture]
        except MeshwrightError:
            return []


def write_picture(drawn: Picture | DrawnAnswer, file: Path) -> None:
    """Write a picture to a file: as an HTML page if its name ends in `.html`, else as SVG."""
    (drawn.html if file.suffix.lower() in (".html", ".htm") else drawn.svg)(file)
