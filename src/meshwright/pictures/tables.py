"""Tables and other parts of the output of commands, for any width of the terminal. Numbers are never truncated."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.pictures.text import WIDTH, terminal_columns, wrap
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

WRONG = "bold red"
"""The style of words such as `DOES NOT FIT`."""


def console(*, stderr: bool = False) -> Console:
    """Return rich's console for stdout (or stderr): as wide as the terminal, or `WIDTH` columns without a terminal."""
    # Without `force_jupyter`, rich displays each printed item in a notebook as an output of its own.
    if stderr:
        return Console(highlight=False, stderr=True, force_jupyter=False)
    width = terminal_columns() or WIDTH
    # Stored text (`str` of an answer, a notebook's HTML) has no colours, although Jupyter supports them.
    if isinstance(sys.stdout, io.StringIO) and not sys.stdout.isatty():
        return Console(highlight=False, width=width, force_terminal=False, color_system=None, force_jupyter=False)
    return Console(highlight=False, width=width, force_jupyter=False)


_WRONG = r"DOES NOT FIT|TOO LATE|NOT AS INFERRED"


def show(out: Console, item: RenderableType, **options: Any) -> None:
    """Print an item on a console; text is wrapped. Without a terminal, trailing spaces are removed.

    options: the options of rich's `Console.print`.
    """
    if isinstance(item, str):
        style = options.pop("style", "")
        words = item.strip()
        indent = item[: item.index(words)]
        for line in wrap(words, out.width, first=indent, then=f"{indent}  "):
            text = Text(line, style=style)
            text.highlight_regex(_WRONG, WRONG)
            show(out, text, soft_wrap=True)
        return
    if out.is_terminal:
        out.print(item, **options)
        return
    with out.capture() as captured:
        out.print(item, **options)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@dataclass(frozen=True)
class Lines:
    """A table without rules, which `table` returns.

    left: indices of left-aligned columns. words: index of the text column, which is wrapped if lines are too long.
    styles: rich's style of each row.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int]
    words: int
    styles: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield lines at the available width, the heading dim."""
        for style, line in self.lines(options.max_width):
            text = Text(line, style=style, no_wrap=True, overflow="ignore")
            text.highlight_regex(_WRONG, WRONG)
            yield text

    def lines(self, width: int) -> Iterator[tuple[str, str]]:
        """Yield (style, line) for each line of the table.

        If rows are too long, the text column is wrapped; if it would be too narrow, its text goes below the row. If the
        other columns alone are too wide, each row becomes several lines of `name value`.
        """
        sizes = [max(len(cells[index]) for cells in (self.columns, *self.rows)) for index in range(len(self.columns))]
        left = width - sum(size + GAP for index, size in enumerate(sizes) if size and index != self.words)
        if left >= min(sizes[self.words], NARROWEST):
            yield from self._in_columns(sizes, left)
        elif left + GAP >= 0:
            yield from self._in_columns([0 if index == self.words else size for index, size in enumerate(sizes)], width)
        else:
            for row, style in zip(self.rows, self.styles, strict=True):
                pairs = [
                    f"{name} {cell}".strip().replace(" ", "\0")
                    for index, (name, cell) in enumerate(zip(self.columns, row, strict=True))
                    if cell and index != self.words
                ]
                yield from ((style, line) for line in wrap("  ".join(pairs), width, then=" " * 5))
                yield from ((style, line) for line in self._under(row[self.words], width))

    def _in_columns(self, sizes: list[int], left: int) -> Iterator[tuple[str, str]]:
        """Yield (style, line) with cells in columns.

        sizes: the width of each column; 0 if the text goes below the row. left: the width for the text.
        """
        sizes = [min(size, left) if index == self.words else size for index, size in enumerate(sizes)]
        if any(self.columns):
            yield "dim", self._line(self.columns, sizes)
        for row, style in zip(self.rows, self.styles, strict=True):
            words = row[self.words]
            if not sizes[self.words]:
                if line := self._line(row, sizes):
                    yield style, line
                yield from ((style, line) for line in self._under(words, left))
                continue
            first, *more = wrap(words, sizes[self.words]) or [""]
            yield style, self._line((*row[: self.words], first, *row[self.words + 1 :]), sizes)
            blank = [""] * len(row)
            for line in more:
                yield style, self._line((*blank[: self.words], line, *blank[self.words + 1 :]), sizes)

    def _under(self, words: str, width: int) -> list[str]:
        """Return the text of a row on separate lines, after the name of its column."""
        if words in ("", "-", "–"):
            return []
        name = f"{self.columns[self.words]}: " if self.columns[self.words] else ""
        return wrap(name + words, width, first=" " * 5, then=" " * 7)

    def _line(self, cells: Sequence[str], sizes: Sequence[int]) -> str:
        """Return one line of cells in columns of these sizes; columns of size 0 are left out."""
        found = [
            cell.ljust(size) if index in self.left else cell.rjust(size)
            for index, (cell, size) in enumerate(zip(cells, sizes, strict=True))
            if size
        ]
        return (" " * GAP).join(found).rstrip()


GAP = 2
"""The number of spaces between columns."""

NARROWEST = 28
"""The smallest width of the text column in characters; if there is less space, its text goes below the row."""


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    folds: int | None = None,
    styles: Iterable[str] = (),
) -> Lines:
    """Return a table without rules.

    Args:
        columns: the headings; if all are empty, none are printed.
        rows: the text of each cell.
        left: indices of the left-aligned columns; others are right-aligned.
        folds: index of the text column, which is wrapped if lines are too long; None if there is no text column.
        styles: rich's style of each row, such as `yellow`; '' for none.
    """
    flush_left = frozenset(index % len(columns) for index in left)
    cells = tuple(map(tuple, rows))
    each = tuple(styles) or ("",) * len(cells)
    if folds is None:  # Add an empty text column.
        return Lines((*columns, ""), tuple((*row, "") for row in cells), flush_left, len(columns), each)
    return Lines(tuple(columns), cells, flush_left, folds % len(columns), each)


def mesh_name(record: Record) -> str:
    """Return a record's mesh as users type it: `fsdp=4,tp=2`."""
    return str(MeshShape(**record.mesh))


def headline(workload: Workload, hardware: str) -> str:
    """Return the first line of a command's output: model, task, tokens, dtype, remat policy, hardware."""
    tokens = f"{workload.sequences} × {workload.seq_len} tokens{workload.in_pairs}"
    what = f"{workload.model.name} · {workload.task} · {tokens}"
    return f"{what} · {workload.compute_dtype} · remat {workload.remat} · {hardware}"


def speed(record: Record) -> str:
    """Return the step time and MFU of a record as text: `step 1.23 s   MFU 45%`."""
    step = show_seconds(record.step_seconds) if record.step_seconds is not None else "?"
    return f"step {step}" + (f"   MFU {show_percent(record.shown_mfu)}" if record.shown_mfu is not None else "")


def predicted_rate_and_memory(planned: Record) -> str:
    """Return the predicted tokens per second and memory per device as text."""
    return (
        f"{show_rate(planned.tokens_per_second or 0.0, 'tok/s')}   {show_bytes(planned.memory_bytes['peak'])} a device"
    )


def collective_table(record: Record) -> Lines:
    """Return a table of a record's collectives, with bytes per device and step, times and exposed times."""
    columns = ("collective", "over", "phase", "bytes a device", "times", "seconds", "exposed")
    rows = [
        (
            move.kind,
            "*".join(move.axes),
            move.phase,
            show_bytes(move.bytes),
            str(move.count),
            show_seconds(move.seconds or 0.0),
            show_seconds(move.exposed_seconds or 0.0),
        )
        for move in record.collectives
    ]
    return table(columns, rows, left=(0, 1, 2))
