"""A table of several plans, one column each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.pictures.tables import Lines, table
from meshwright.planning.plan import Plan
from meshwright.planning.why.step import computed_mfu
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

Row = tuple[str, ...]


def comparison(plans: Sequence[Plan]) -> Lines:
    """Return a table with a column for each plan.

    Rows: step time, MFU, tokens per second, bound, the parts of step time and memory, and the exposed communication
    over each set of axes.
    """
    records, shares = [plan.predicted for plan in plans], [computed_mfu(plan) for plan in plans]
    rows = [
        _row("step", records, lambda record: show_seconds(record.step_seconds or 0.0)),
        *([] if None in shares else [("MFU", *(show_percent(share or 0.0) for share in shares))]),
        _row("tokens a second", records, lambda record: show_rate(record.tokens_per_second or 0.0, "tok/s")),
        _row("bound by", records, lambda record: str(record.bound)),
        *_terms("", records, lambda record: record.breakdown_seconds, show_seconds),
        _row("memory", records, _memory),
        *_terms("", records, lambda record: record.memory_bytes, show_bytes),
        *_terms("exposed over ", records, _exposed, show_seconds),
    ]
    return table(("", *(str(plan.mesh) for plan in plans)), rows)


def _row(name: str, records: Iterable[Record], value: Callable[[Record], str]) -> Row:
    """Return a row: its name, then the text of each record."""
    return (name, *(value(record) for record in records))


def _terms(
    prefix: str,
    records: Sequence[Record],
    amounts: Callable[[Record], Mapping[str, float]],
    shown: Callable[[float], str],
) -> list[Row]:
    """Return a row for each part of a total, such as the step time. Parts that are zero in every record are left out.

    prefix: begins the row's name. amounts: returns a record's parts by name. shown: formats an amount.
    """
    found = [amounts(record) for record in records]
    names = dict.fromkeys(name for terms in found for name, amount in terms.items() if amount and name != "peak")
    return [
        (f"  {prefix}{name}", *(shown(terms[name]) if terms.get(name) else "-" for terms in found)) for name in names
    ]


def _memory(record: Record) -> str:
    """Return the peak memory, marked if it does not fit."""
    return show_bytes(record.memory_bytes["peak"]) + ("" if record.fits else ", does not fit")


def _exposed(record: Record) -> dict[str, float]:
    """Return the exposed seconds per step of a record's collectives, by axes, such as `dp*fsdp`."""
    seconds: dict[str, float] = {}
    for move in record.own_collectives:
        name = "*".join(move.axes)
        seconds[name] = seconds.get(name, 0.0) + (move.exposed_seconds or 0.0)
    return seconds
