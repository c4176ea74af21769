"""`meshwright plan --ops`: every op of a plan's step in the notation, with sizes, flops and bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from meshwright.description.step.sequence import halves_queries
from meshwright.pictures.tables import console, show
from meshwright.pictures.text import terms, wrap
from meshwright.planning.cost.flops import step_flops
from meshwright.planning.cost.roofline import hardware_intensity
from meshwright.planning.cost.table import LETTERS, LocalProduct, OpRow, op_table
from meshwright.planning.plan import Plan
from meshwright.record import Collective
from meshwright.units import show_bytes, show_flops


def ops_data(plan: Plan) -> list[dict[str, Any]]:
    """Return the table of ops as data; flops and bytes are per device and for one execution of the op."""
    return [_row_data(row) for row in op_table(plan.workload, plan.mesh, plan.system, plan.strategy)]


def _row_data(row: OpRow) -> dict[str, Any]:
    """Return one row as plain data."""
    product = row.product
    return {
        "name": row.name,
        "phase": row.phase,
        "op": row.notation,
        "times": _whole(row.times),
        "times_again": _whole(row.times_recomputed),
        "local": [[_whole(size) for size in sizes] for sizes in _operands(product)] if product else [],
        "flops": _whole(row.flops),
        "collectives": [
            {"kind": c.kind, "axes": list(c.axes), "array": c.array, "bytes": c.bytes, "seconds": c.seconds,
             "times": c.count}
            for c in row.single_collectives
        ],
        "memory_intensity": row.memory,
        "network_intensity": row.network,
        "bound": row.bound,
    }  # fmt: skip


def _operands(product: LocalProduct) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the local shapes of a matmul's operands, [rows, inner] and [inner, columns].

    A batch of several matmuls has a leading dim `repeats`. Dims are divided by mesh degrees, so sizes may be fractions.
    """
    many = (product.repeats,) if product.repeats > 1 else ()
    return (*many, product.rows, product.inner), (*many, product.inner, product.columns)


def print_ops(plan: Plan) -> None:
    """Print every op of a step: its text in the notation, then a line of figures, then its collectives."""
    workload, mesh, system = plan.workload, plan.mesh, plan.system
    rows = op_table(workload, mesh, system, plan.strategy)
    parts = plan.strategy.num_microbatches
    print()
    show(
        console(),
        f"ops of a step on {mesh}, of one device, at the peaks of {system}; times: how often a step runs each, of"
        f" {parts} microbatch{'es' if parts > 1 else ''}, + how often again",
    )
    print()
    show(console(), _line("", "sizes", "times", "flops", "HBM", "bound by"))
    for name, items in groupby(rows, key=lambda row: row.name):
        print(f" {name}")
        for row in items:
            for line in _lines(row):
                show(console(), line)
    print()
    flops = vars(step_flops(workload, mesh, plan.strategy))
    print(terms("flops", {phase: show_flops(total) for phase, total in flops.items() if total}))
    masked = sum(row.step_flops for row in rows if row.is_attention)
    hidden = "a third" if plan.strategy.attention == "scores" and halves_queries(workload, mesh) else "half"
    wanted = hardware_intensity(system, dtype=workload.compute_dtype)
    print(_note(" letters ", LETTERS))
    print(
        _note(
            " note:   ",
            f"sizes, flops and bytes are per execution of an op; HBM: flops per byte moved there, of"
            f" {wanted:,.0f} wanted; attention is counted as computed, {show_flops(masked)} of all: {hidden} of"
            f" that is masked, which a fused kernel skips; norms, activations and the update"
            f" are not matmuls and are not listed",
        )
    )


def _lines(row: OpRow) -> Iterator[str]:
    """Yield the lines of an op: its text, the figures of its matmul, its collectives."""
    yield f"   {row.notation}"
    phase = f"{row.phase}, again" if row.times_recomputed else row.phase
    times = f"{row.times:g}+{row.times_recomputed:g}" if row.times_recomputed else f"{row.times:g}"
    moves = row.single_collectives
    if row.product is None:
        same: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
        for move in moves:
            same.setdefault((move.kind, move.axes, show_bytes(move.bytes)), []).append(move)
        first, *others = [
            _collective(found[0] if len(found) == 1 else replace(found[0], array=f"{len(found)} arrays"))
            for found in same.values()
        ]
        yield f"     {phase:<15}{times:<8}{first}"
        yield from (f"{'':<28}{move}" for move in others)
        return
    memory = f"{row.memory:,.0f}" if row.memory else ""
    yield _line(phase, _sizes(row.product), times, show_flops(row.flops), memory, row.bound or "")
    yield from (f"       {_collective(move)}{_network(row, move)}" for move in moves)


def _line(phase: str, sizes: str, times: str, flops: str, memory: str, bound: str) -> str:
    """Return one line of figures."""
    return f"     {phase:<15}{sizes:<34}{times:>7}{flops:>12}{memory:>8}  {bound}".rstrip()


def _sizes(product: LocalProduct) -> str:
    """Return a local matmul as text: how often it is repeated, and [rows, inner] @ [inner, columns]."""
    count, rows, inner, columns = (f"{size:.0f}" for size in product)
    return f"{f'{count} × ' if product.repeats > 1 else ''}[{rows}, {inner}] @ [{inner}, {columns}]"


def _collective(move: Collective) -> str:
    """Return the kind, axes, array and bytes of a collective as text."""
    return f"{move.kind} over {'*'.join(move.axes)} of {move.array}, {show_bytes(move.bytes)}"


def _network(row: OpRow, move: Collective) -> str:
    """Return, as text, an op's flops per byte of the collective `move`, and the flops per byte that would hide it.

    Only for the op's longest collective; '' for others.
    """
    longest = max(row.single_collectives, key=lambda each: each.seconds or 0.0)
    if row.network is None or move != longest:
        return ""
    return f": {row.network:,.0f} flops a byte, of {row.network_wanted:,.0f} wanted"


def _note(title: str, text: str) -> str:
    """Return a title followed by text, wrapped."""
    return "\n".join(wrap(text, first=title, then=" " * len(title)))


def _whole(value: float) -> float:
    """Return a number as an int if it is whole."""
    return int(value) if value == int(value) else value
