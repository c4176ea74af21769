"""`meshwright plan --compare`: meshes beside each other, term by term."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table

from meshwright.cli.tables import console, folded, show, speed, table
from meshwright.planner import Plan, how, reason
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

ABREAST = 3
"""The meshes that fit beside each other on a screen."""

Row = tuple[str, ...]


def print_compared(plans: Sequence[Plan]) -> None:
    """Print the fastest that fits, then all meshes beside each other, then how each runs and why it loses."""
    from meshwright.cli.plan_screen import headline

    best = min(plans, key=order)
    print(f"{headline(best)}\n")
    fits = "" if best.predicted.fits else "   NONE FITS"
    show(console(), f"  {best.mesh}   {speed(best.predicted)}   {best.predicted.bound} bound{fits}", style="bold")
    for start in range(0, len(plans), ABREAST):
        print()
        show(console(), comparison(plans[start : start + ABREAST]))
    print()
    for plan in plans:
        loses = "the best of these" if plan == best else f"loses because: {reason(plan, best)}"
        print(folded(f"{plan.mesh}: {loses}"))
        print(folded(f"       {how(plan)}"))
    print(f"\n next   --mesh-dim {best.mesh} -o plan.yaml")


def compare_data(plans: Sequence[Plan]) -> None:
    """Print the meshes as JSON, in the order in which they were asked for."""
    from meshwright.cli.plan_screen import candidate

    best = min(plans, key=order)
    print(json.dumps({"compared": [candidate(plan, best) for plan in plans]}, indent=2))


def order(plan: Plan) -> tuple[bool, float, int]:
    """Those that fit first, then by step time; those that do not by what they want."""
    fits, peak = bool(plan.predicted.fits), plan.predicted.memory_bytes["peak"]
    return not fits, (plan.predicted.step_seconds or 0.0) if fits else 0.0, peak


def comparison(plans: Sequence[Plan]) -> Table:
    """The plans side by side: step, MFU, each term of the step, of the memory, and what is exposed over each axis."""
    records = [plan.predicted for plan in plans]
    rows = [
        _row("step", records, lambda record: show_seconds(record.step_seconds or 0.0)),
        _row("MFU", records, lambda record: show_percent(record.mfu or 0.0)),
        _row("tokens a second", records, lambda record: show_rate(record.tokens_per_second or 0.0, "tok/s")),
        _row("bound by", records, lambda record: str(record.bound)),
        *_terms("", records, lambda record: record.breakdown_seconds, show_seconds),
        _row("memory", records, _memory),
        *_terms("", records, lambda record: record.memory_bytes, show_bytes),
        *_terms("exposed over ", records, _exposed, show_seconds),
    ]
    return table(("", *(str(plan.mesh) for plan in plans)), rows)


def _row(name: str, records: Iterable[Record], value: Callable[[Record], str]) -> Row:
    """One line."""
    return (name, *(value(record) for record in records))


def _terms(
    prefix: str,
    records: Sequence[Record],
    amounts: Callable[[Record], Mapping[str, float]],
    shown: Callable[[float], str],
) -> list[Row]:
    """A line for each term that any of the records has."""
    found = [amounts(record) for record in records]
    names = dict.fromkeys(name for terms in found for name, amount in terms.items() if amount and name != "peak")
    return [
        (f"  {prefix}{name}", *(shown(terms[name]) if terms.get(name) else "-" for terms in found)) for name in names
    ]


def _memory(record: Record) -> str:
    """The peak, marked where it does not fit."""
    return show_bytes(record.memory_bytes["peak"]) + ("" if record.fits else ", does not fit")


def _exposed(record: Record) -> dict[str, float]:
    """The seconds exposed over each set of axes."""
    seconds: dict[str, float] = {}
    for move in record.collectives:
        name = "*".join(move.axes)
        seconds[name] = seconds.get(name, 0.0) + (move.exposed_seconds or 0.0)
    return seconds
