"""Tables and lines that several commands print."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.mesh import MeshShape
from meshwright.record import Record
from meshwright.step import Workload
from meshwright.units import show_bytes, show_percent, show_seconds

WIDTH = 100
"""The columns that every screen fits."""


def console(*, stderr: bool = False) -> Console:
    """Where tables go: the terminal, or plain text of `WIDTH` columns where there is none."""
    found = Console(highlight=False, stderr=stderr)
    return found if found.is_terminal else Console(highlight=False, stderr=stderr, width=WIDTH)


def show(out: Console, item: RenderableType, **options: Any) -> None:
    """Print an item; as plain text without the spaces that fill its lines up."""
    if out.is_terminal:
        out.print(item, **options)
        return
    with out.capture() as captured:
        out.print(item, **options)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), folds: int = -1
) -> Table:
    """A table without rules; columns are flush right but for those in `left`; one folds where lines are too long."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for index, column in enumerate(columns):
        justify = "left" if index in left else "right"
        made.add_column(column, justify=justify, no_wrap=index != folds % len(columns), header_style="dim")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def folded(line: str) -> str:
    """A line of words, set in and broken where it is too long."""
    return textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 8)


def mesh_name(record: Record) -> str:
    """A record's mesh as people type it."""
    return str(MeshShape(**record.mesh))


def headline(workload: Workload, hardware: str) -> str:
    """What a screen is about."""
    tokens = f"{workload.batch} × {workload.seq_len} tokens"
    return f"{workload.model.name} · train · {tokens} · {workload.compute_dtype} · remat {workload.remat} · {hardware}"


def terms(title: str, amounts: Mapping[str, str]) -> str:
    """Named amounts in a row after a title, broken into lines under each other."""
    words = "  ".join(f"{name} {amount}".replace(" ", "\0") for name, amount in amounts.items())
    lines = textwrap.wrap(words, WIDTH, initial_indent=f" {title:<8}", subsequent_indent=" " * 9)
    return "\n".join(lines).replace("\0", " ")


def speed(record: Record) -> str:
    """Step time and MFU in a few words."""
    step = show_seconds(record.step_seconds) if record.step_seconds is not None else "?"
    return f"step {step}" + (f"   MFU {show_percent(record.mfu)}" if record.mfu is not None else "")


def collective_table(record: Record) -> Table:
    """The collectives of a step by phase, kind and mesh axes, with what is exposed of them."""
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
