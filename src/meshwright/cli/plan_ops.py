"""`meshwright plan --ops`: every op of the best mesh's step in the notation, its sizes and flops, and what binds it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from meshwright.cli.tables import WIDTH, terms
from meshwright.cost import Intensity, PricedWay, hardware_intensity, price
from meshwright.hardware import System
from meshwright.mesh import MeshShape
from meshwright.notation import Multiply
from meshwright.record import Collective
from meshwright.step import Op, Workload, flops_by_phase, halves_queries, step_ops
from meshwright.units import show_bytes, show_flops

LETTERS = (
    "B batch, S sequence, T sequence of keys, D stream, K kv heads, G query heads a kv head, H head dim, F mlp,"
    " V vocab, E experts, C tokens of an expert, L and R latents, P positions; d before a name: its gradient"
)


@dataclass(frozen=True)
class PricedOp:
    """An op priced on a system; again: how often backward runs it once more."""

    op: Op
    priced: PricedWay
    again: int

    def to_json(self) -> dict[str, Any]:
        """The op as plain data, bytes and flops of one device and of one time that it runs."""
        op, way = self.op, self.priced
        products = way.way.products
        return {
            "name": op.name,
            "phase": op.phase,
            "op": str(op.expression),
            "times": op.count,
            "times_again": self.again,
            "local": [list(op.sizes.local_shape(array)) for product in products for array in product.operands],
            "flops": op.flops,
            "collectives": [
                {"kind": c.kind, "axes": list(c.axes), "array": c.array, "bytes": c.bytes, "seconds": c.seconds}
                for c in way.collectives
            ],
            "memory_intensity": _value(way.memory),
            "network_intensity": _value(way.network),
            "bound": way.bound,
        }


def price_ops(workload: Workload, mesh: MeshShape, system: System) -> tuple[PricedOp, ...]:
    """Every op of a step with its price."""
    return _priced(step_ops(workload, mesh), system, workload.compute_dtype)


def _priced(ops: Iterable[Op], system: System, dtype: str) -> tuple[PricedOp, ...]:
    """Ops with their prices, what backward makes again counted with the first of its kind."""
    found: dict[tuple[str, str, bool], PricedOp] = {}
    for op in ops:
        key = op.name, str(op.expression), op.phase == "backward"
        if key in found:
            found[key] = replace(found[key], again=found[key].again + op.count)
        else:
            priced = price(op.inference, system, dtype=dtype).chosen
            found[key] = PricedOp(op, priced, again=0)
    return tuple(found.values())


def print_ops(workload: Workload, mesh: MeshShape, system: System) -> None:
    """Print every op of a step: its text in the notation, then a line of figures, then its collectives."""
    ops = step_ops(workload, mesh)
    print(f"\nops of a step on {mesh}, of one device, at the peaks of {system};")
    print("the batch taken as one and weights gathered for each use, as train does it\n")
    print(_row("", "sizes", "times", "flops", "HBM", "bound by"))
    priced = _priced(ops, system, workload.compute_dtype)
    for name, items in groupby(priced, key=lambda item: item.op.name):
        print(f" {name}")
        for item in items:
            print("\n".join(_lines(item)))
    print()
    print(terms("flops", {phase: show_flops(total) for phase, total in flops_by_phase(ops, mesh).items() if total}))
    masked = sum(op.flops * op.count for op in ops if op.has_mask) / mesh.pp
    hidden = "a third" if halves_queries(workload, mesh) else "half"
    wanted = hardware_intensity(system, dtype=workload.compute_dtype)
    print(_note(" letters ", LETTERS))
    print(
        _note(
            " note:   ",
            f"sizes, flops and bytes are of each time that an op runs; HBM: flops for each byte it moves there, of"
            f" {wanted:,.0f} wanted; attention is counted as computed, {show_flops(masked)} of all: {hidden} of"
            f" that is behind the causal mask, where a fused kernel does nothing; norms, activations and the update"
            f" are no products and not listed",
        )
    )


def _lines(item: PricedOp) -> Iterator[str]:
    """The lines of an op: its text, the figures of its product, its collectives."""
    op, way = item.op, item.priced
    yield from textwrap.wrap(str(op.expression), WIDTH, initial_indent="   ", subsequent_indent="     ")
    phase = f"{op.phase}, again" if item.again else op.phase
    times = f"{op.count}+{item.again}" if item.again else str(op.count)
    moves = [f"{_collective(move)}{_network(way, move)}" for move in way.collectives]
    if not way.way.products:
        yield f"     {phase:<15}{times:<8}{moves[0]}"
        yield from (f"{'':<28}{move}" for move in moves[1:])
        return
    memory = f"{way.memory.value:,.0f}" if way.memory else ""
    yield _row(phase, _sizes(way.way.products[0], op), times, show_flops(op.flops), memory, way.bound or "")
    yield from (f"       {move}" for move in moves)


def _row(phase: str, sizes: str, times: str, flops: str, memory: str, bound: str) -> str:
    """One line of figures."""
    return f"     {phase:<15}{sizes:<34}{times:>7}{flops:>12}{memory:>8}  {bound}".rstrip()


def _sizes(product: Multiply, op: Op) -> str:
    """A local product as matrices: how many, and [rows, inner] @ [inner, columns] of each."""
    left, right = product.operands
    made = product.result.dims
    local = {dim: op.sizes.local_size(array, dim) for array in product.operands for dim in array.dims}

    def size(dims: Iterable[str]) -> int:
        return math.prod(local[dim] for dim in dims)

    shared = [dim for dim in left.dims if dim in right.dims]
    many = size(dim for dim in shared if dim in made)
    inner = size(dim for dim in shared if dim not in made)
    rows, columns = (size(d for d in array.dims if d not in shared) for array in (left, right))
    summed = size(d for array in (left, right) for d in array.dims if d not in shared and d not in made)
    assert summed == 1, product
    return f"{f'{many} × ' if many > 1 else ''}[{rows}, {inner}] @ [{inner}, {columns}]"


def _collective(move: Collective) -> str:
    """A collective in words."""
    return f"{move.kind} over {'*'.join(move.axes)} of {move.array}, {show_bytes(move.bytes)}"


def _network(way: PricedWay, move: Collective) -> str:
    """The flops for each byte of the longest collective of an op, and what the links want."""
    if way.network is None or not way.way.products or move is not max(way.collectives, key=lambda c: c.seconds or 0.0):
        return ""
    return f": {way.network.value:,.0f} flops a byte, of {way.network.here:,.0f} wanted"


def _note(title: str, text: str) -> str:
    """A title and words after it, broken into lines under each other."""
    return textwrap.fill(text, WIDTH, initial_indent=title, subsequent_indent=" " * len(title))


def _value(found: Intensity | None) -> float | None:
    """The flops a byte of an intensity."""
    return found.value if found else None
