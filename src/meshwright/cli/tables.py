"""Tables and lines that several commands print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.mesh import MeshShape
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_seconds
from meshwright.workload import Workload

WIDTH = 100
"""The columns that every screen fits."""


def console() -> Console:
    """Where tables go: the terminal, or plain text of `WIDTH` columns where there is none."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> Table:
    """A table without rules; columns are flush right but for those in `left`."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for index, column in enumerate(columns):
        made.add_column(
            column, justify="left" if index in left else "right", no_wrap=index not in left, header_style="dim"
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def mesh_name(record: Record) -> str:
    """A record's mesh as people type it."""
    return str(MeshShape(**record.mesh))


def headline(workload: Workload, hardware: str, purpose: str = "train") -> str:
    """What a screen is about."""
    return (
        f"{workload.model.name} · {purpose} · {workload.batch} × {workload.seq_len} tokens · {workload.compute_dtype}"
        f" · remat {workload.remat} · {hardware}"
    )


def terms(amounts: Mapping[str, float], unit: str) -> str:
    """Named amounts in a row, in the unit (`s` or `B`) and prefix of the largest."""
    show = show_seconds if unit == "s" else show_bytes
    return "  ".join(f"{name} {show(amount)}" for name, amount in amounts.items())


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
