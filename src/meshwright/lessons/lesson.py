"""The lessons: MyST Markdown files, whose code cells are fenced as {code-cell}, read and written as notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from meshwright.errors import MeshwrightError

PAGES = Path(__file__).parent / "pages"

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_CODE = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CHECKED = re.compile(r"""^\s*check\(["']([\w-]+)["']""", re.MULTILINE)


class Cell(NamedTuple):
    """A cell of a lesson, without the blank lines around it."""

    kind: Literal["markdown", "code"]
    text: str


@dataclass(frozen=True)
class Lesson:
    """A lesson: its number, title, reading time in minutes, and cells."""

    number: int
    file: Path
    title: str
    minutes: int
    cells: tuple[Cell, ...]

    @property
    def exercises(self) -> tuple[str, ...]:
        """The names of its exercises, in order."""
        return exercises_in("\n".join(self.code))

    @property
    def code(self) -> tuple[str, ...]:
        """The source of each code cell."""
        return tuple(cell.text for cell in self.cells if cell.kind == "code")

    def notebook(self) -> str:
        """Return the lesson as a Jupyter notebook (nbformat 4.5), without outputs."""
        cells = [
            {
                "cell_type": cell.kind,
                "id": f"cell-{place}",
                "metadata": {},
                "source": cell.text.splitlines(keepends=True),
                **({"execution_count": None, "outputs": []} if cell.kind == "code" else {}),
            }
            for place, cell in enumerate(self.cells)
        ]
        metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


@cache
def lessons() -> tuple[Lesson, ...]:
    """Return all lessons in order."""
    return tuple(map(_read_lesson, sorted(PAGES.glob("*.md"))))


def find_lesson(text: str) -> Lesson:
    """Return the lesson with a number, given as text. Raises an error that lists the numbers if there is none."""
    found = lessons()
    for lesson in found:
        if text.strip().isdecimal() and lesson.number == int(text):
            return lesson
    raise MeshwrightError(f"there is no lesson {text!r}; lessons are numbered {found[0].number} to {found[-1].number}")


def read_code(file: Path) -> tuple[str, ...]:
    """Return the code cells of a notebook or a MyST page; a Python script is one cell.

    Raises:
        MeshwrightError: the file is none of these.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise MeshwrightError(
            f"{file} is not text; it is a notebook (.ipynb), a lesson (.md) or a script (.py)"
        ) from None
    if file.suffix == ".ipynb":
        try:
            cells = json.loads(text)["cells"]
            return tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        except (ValueError, KeyError, TypeError):
            raise MeshwrightError(f"{file} is not a notebook of format 4: it has no list of cells") from None
    if file.suffix == ".md":
        return tuple(cell.text for cell in _cells(text) if cell.kind == "code")
    if file.suffix == ".py":
        return (text,)
    raise MeshwrightError(f"{file} is not a lesson: it is a notebook (.ipynb), a lesson (.md) or a script (.py)")


def exercises_in(code: str) -> tuple[str, ...]:
    """Return the names of the exercises that a piece of code calls `check` for, each once."""
    return tuple(dict.fromkeys(_CHECKED.findall(code)))


def _read_lesson(file: Path) -> Lesson:
    """Read a page. Title and minutes come from its front matter, which jupytext reads too."""
    text = file.read_text(encoding="utf-8")
    front = _FRONT.match(text)
    assert front, f"{file.name} has no front matter"
    facts = yaml.safe_load(front[1])
    cells = tuple(_cells(text[front.end() :]))
    return Lesson(int(file.name[:2]), file, facts["title"], facts["minutes"], cells)


def _cells(text: str) -> Iterator[Cell]:
    """Yield the cells of a page, without its front matter."""
    text = _FRONT.sub("", text)
    end = 0
    for fence in _CODE.finditer(text):
        if prose := text[end : fence.start()].strip():
            yield Cell("markdown", prose)
        yield Cell("code", fence[1].strip())
        end = fence.end()
    if prose := text[end:].strip():
        yield Cell("markdown", prose)
