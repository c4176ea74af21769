"""Predict the record of a program in a layout: time, memory and collectives, at the planner's rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.achieved import HBM_SHARE, product_seconds
from meshwright.planning.cost.rates.collective_time import planned_seconds, stops_ops
from meshwright.planning.cost.rates.efficiency import launch_seconds, layer_shares
from meshwright.proof.programs.classes import batch_atoms
from meshwright.proof.programs.flat import Atoms, Value
from meshwright.proof.programs.layout import Layout, Sizes, dims_at_rest, of_any_order
from meshwright.proof.programs.products import Contraction, Moves, moves
from meshwright.proof.programs.trace import Program
from meshwright.proof.programs.work import Live, Moved, Work
from meshwright.record import Bound, Collective, Kind, Phase, Record, merge

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "int8": "int8", "float64": "float32"}
"""The planner's names of JAX's dtypes; ops in other dtypes are priced as bf16."""

PARTS = tuple(2**power for power in range(9))
"""The numbers of matmuls into which a GPU library may split a matmul with a long contraction and a small result.

Each is over a part of the contraction; their float32 results are added. An example is the gradient of a convolution's
weight, which is summed over all pixels.
"""


Sent = tuple[Kind, tuple[str, ...], Phase, float, bool, int]
"""A collective: kind, axes, phase, bytes per execution (as in `record.Collective`), whether it overlaps, executions."""


@dataclass(frozen=True)
class Priced:
    """A program on a system. Its methods predict the cost of a layout."""

    program: Program
    work: Work
    system: System

    @cached_property
    def state(self) -> tuple[Value, ...]:
        """The leaves of the state."""
        return tuple(self._argument(number) for number in self.program.state)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The arguments that are not state."""
        count = len(self.program.arguments)
        return tuple(self._argument(number) for number in range(count) if number not in self.program.state)

    @cached_property
    def batch(self) -> frozenset[int]:
        """The atoms of the batch."""
        return frozenset(batch_atoms(self.program))

    @cached_property
    def weights(self) -> frozenset[int]:
        """The first atom of each dim of the state's leaves."""
        return frozenset(dim[0] for value in self.state for dim in value.dims if dim)

    @cached_property
    def rest(self) -> dict[tuple[int, ...], Atoms]:
        """{atoms in any order: dims} of the state's leaves, from `layout.dims_at_rest`."""
        return dims_at_rest(self.program, self.barred)

    def _is_of_state(self, value: Value) -> bool:
        """Whether a value has the dims of a leaf of the state, such as its gradient."""
        return of_any_order(value.dims) in self.rest

    @cached_property
    def barred(self) -> frozenset[int]:
        """Atoms that no axis may split."""
        return frozenset(self.program.dims.why_barred())

    def _argument(self, number: int) -> Value:
        aval: Any = self.program.body.jaxpr.invars[number].aval
        _, shape = self.program.arguments[number]
        width = float(getattr(aval.dtype, "itemsize", 0) or 0)
        return Value(tuple(self.program.dims.atoms(dim) for dim in shape), width)

    def record(self, layout: Layout) -> Record:
        """Return the predicted record of a layout.

        Collectives of weights and their gradients overlap with ops, up to the ops' time; all others are exposed.
        """
        products = [_local(product, times, layout) for product, times in self.work.products.items()]
        passes = sum(times * self._pass_seconds(value, layout) for value, times in self.work.passes.items())
        computing = {
            "matmuls": sum(each.times * self._product_seconds(each, layout) for each in products),
            "passes over memory": passes,
            "launches": self.work.kernels * launch_seconds(self.system),
        }
        total = sum(computing.values())
        collectives = self._timed(layout, total, products)
        exposed = sum(move.exposed_seconds or 0.0 for move in collectives)
        breakdown = computing | {"exposed communication": exposed}
        memory = self.memory(layout)
        step = sum(breakdown.values())
        bound: dict[Bound, float] = {
            "compute": computing["matmuls"],
            "memory": computing["passes over memory"],
            "communication": exposed,
        }
        return Record(
            origin="predicted",
            mesh=layout.degrees,
            hardware=str(self.system),
            step_seconds=step,
            flops=sum(each.times * 2 * math.prod(each.sizes) for each in products),
            memory_bytes=memory,
            fits=memory["peak"] <= self.system.plannable_bytes,
            bound=max(bound, key=bound.__getitem__),
            breakdown_seconds=breakdown,
            collectives=merge(collectives),
            notes=lay_mesh(self.system, layout.degrees).notes,
        )

    def _timed(self, layout: Layout, computing: float, products: Sequence[_Local]) -> list[Collective]:
        """Return the collectives with their seconds. Those of weights and gradients overlap with ops.

        computing: seconds of all ops.
        """
        placed = lay_mesh(self.system, layout.degrees)
        counts = Counter[tuple[Kind, tuple[str, ...], Phase, float, bool]]()
        for *sent, times in self._collectives(layout, products):
            counts[tuple(sent)] += times  # type: ignore[index]
        moves = []
        for (kind, axes, phase, size, hides), times in counts.items():
            if size:
                move = Collective(kind=kind, axes=axes, phase=phase, bytes=round(size * times), count=times)
                hides = hides and not stops_ops(move, placed)
                moves.append((replace(move, seconds=planned_seconds(move, placed)), hides))
        wanted = sum(move.seconds or 0.0 for move, hides in moves if hides)
        share = max(0.0, 1 - computing / wanted) if wanted else 0.0
        return [
            replace(move, exposed_seconds=(share if hides else 1.0) * (move.seconds or 0.0)) for move, hides in moves
        ]

    @cached_property
    def scores(self) -> frozenset[tuple[int, ...]]:
        """The dims, in any order, of attention scores: batched matmuls' results larger than both operands together."""
        elements = Layout((), Sizes(self.program), self.barred).elements
        return frozenset(
            of_any_order(product.result.dims)
            for product in self.work.products
            if self.work.is_tpu and {*product.places[0]} & {*product.places[1]} - {None}
            if elements(product.result.dims) > elements(product.left.dims) + elements(product.right.dims)
        )

    def _of_scores(self, value: Value) -> Value | None:
        """Return attention scores as a declared model's plan counts them, with at most 2 bytes each; None for others.

        The speed of attention in a layer, `layer_shares`, was measured for that count.
        """
        is_of_scores = of_any_order(value.dims) in self.scores
        return Value(value.dims, min(value.width, 2.0)) if is_of_scores else None

    def _pass_seconds(self, value: Value, layout: Layout) -> float:
        """Return the seconds of reading or writing a value once."""
        scores, rate = self._of_scores(value), HBM_SHARE * self.system.hbm_bytes_per_second
        if scores is not None:
            return layout.size(scores) / rate / layer_shares(self.system)["attention"]
        return self._at_rest(value, layout) / rate

    def _product_seconds(self, local: _Local, layout: Layout) -> float:
        values = (local.product.left, local.product.right, local.product.result)
        scores = [self._of_scores(value) for value in values]
        moved = sum(layout.size(own or value) for own, value in zip(scores, values, strict=True))
        dtype = DTYPES.get(local.product.dtype, "bf16")
        rows, inner, columns = local.sizes

        def seconds(moved_bytes: float, parts: int = 1) -> float:
            summed = 8 * rows * columns * parts if parts > 1 else 0
            return product_seconds(
                rows * parts, inner / parts, columns, system=self.system, dtype=dtype, moved_bytes=moved_bytes + summed
            )

        if self.system.chip.kind == "gpu":
            return min(seconds(moved, parts) for parts in PARTS if parts <= inner)
        shares = layer_shares(self.system)
        if any(scores):
            return seconds(moved) / shares["attention"]
        # Inside a program a matmul computes more slowly than alone, as in a declared model's plan; its bytes take as
        # long.
        return max(seconds(moved), seconds(1.0) / shares["rest"])

    def _at_rest(self, value: Value, layout: Layout) -> float:
        """Return the bytes of a value on a device. Values with a state leaf's dims are split like the state."""
        size = layout.size(value)
        return size / layout.degree(layout.stored_over(value.dims)) if self._is_of_state(value) else size

    def _collectives(self, layout: Layout, products: Sequence[_Local]) -> Iterator[Sent]:
        """Yield the collectives of a step: gathers of parameters split at rest, and the collectives of all ops."""
        for (value, phase), times in self.work.gathered.items():
            if axes := layout.stored_over(value.dims):
                yield "all-gather", axes, phase, layout.size(value), True, times
        for each in products:
            yield from self._of_product(each, layout)
        for moved, times in self.work.moved.items():
            yield from self._of_moved(moved, times, layout)

    def _of_product(self, local: _Local, layout: Layout) -> Iterator[Sent]:
        product, times, (gathered, partial, scattered) = local.product, local.times, local.moves
        for number, value in enumerate((product.left, product.right)):
            axes = gathered[number]
            for one, place in product.earlier[number] if axes else ():
                axes = tuple(axis for axis in axes if axis not in moves(one, layout).gathered[place])
            if axes:
                width = min(value.width, 2.0) if product.rounds else value.width
                size = width * layout.elements(value.dims) * layout.degree(axes)
                yield "all-gather", axes, product.phase, size, False, times
        turns = 1
        if self.system.chip.kind != "cpu":
            # XLA:CPU has no passes that add before they reduce.
            turns = product.turns
            there = {axis for dim in product.joins if dim for axis in layout.table.get(dim[0], ())}
            partial = tuple(axis for axis in partial if axis not in there)
            scattered = tuple(axis for axis in scattered if axis not in there)
        if scattered:
            yield from self._scatter(product.result, scattered, product.phase, times, layout)
        if partial:
            found = list(self._sum(product.result, partial, product.phase, times, layout))
            # Scatters run in every iteration of a loop.
            turns = 1 if any(kind == "reduce-scatter" for kind, *_ in found) else turns
            for kind, axes, phase, size, hides, count in found:
                yield kind, axes, phase, size, hides, count // turns

    def _of_moved(self, moved: Moved, times: int, layout: Layout) -> Iterator[Sent]:
        splits = dict(zip(moved.operand.dims, layout.split(moved.operand.dims), strict=True))
        axes = tuple(axis for dim in dict.fromkeys(moved.dims) for axis in splits.get(dim, ()))
        if moved.kind == "sum" and self._is_of_state(moved.operand) and (stored := layout.stored(moved.operand.dims)):
            # E.g. the norm of all gradients, which are sharded like their leaves.
            axes += stored[1] if moved.operand.dims[stored[0]] in moved.dims else ()
        if not axes:
            return
        if moved.kind == "whole":
            size = layout.size(moved.operand) * layout.degree(axes)
            yield "all-gather", axes, moved.phase, size, False, times
        else:
            kept = {axis for split in layout.split(moved.result.dims) for axis in split}
            if scattered := tuple(axis for axis in axes if axis in kept):
                whole = layout.size(moved.operand) * layout.degree(scattered)
                if moved.kind != "sum" and whole <= layout.size(moved.result) * layout.degree(scattered):
                    # The partitioner chooses the cheaper: gather the operand, or add up the result.
                    yield "all-gather", scattered, moved.phase, whole, False, times
                else:
                    yield from self._scatter(moved.result, scattered, moved.phase, times, layout)
            if partial := tuple(axis for axis in axes if axis not in kept):
                yield from self._sum(moved.result, partial, moved.phase, times, layout)

    def _scatter(self, value: Value, axes: tuple[str, ...], phase: Phase, times: int, layout: Layout) -> Iterator[Sent]:
        """Yield the collective that adds up partial sums and scatters them over a dim of the result, `times` times."""
        # XLA:CPU adds on all devices, and each keeps its part.
        kind = "all-reduce" if self.system.chip.kind == "cpu" else "reduce-scatter"
        yield kind, axes, phase, layout.size(value) * layout.degree(axes), False, times

    def _sum(self, value: Value, axes: tuple[str, ...], phase: Phase, times: int, layout: Layout) -> Iterator[Sent]:
        """Yield the collectives that add up partial sums; gradients are scattered over the axes that shard them.

        times: executions per step.
        """
        size, is_gradient = layout.size(value), phase == "backward" and self._is_of_state(value)
        scattered = tuple(axis for axis in layout.stored_over(value.dims) if axis in axes) if is_gradient else ()
        if scattered:
            yield "reduce-scatter", scattered, phase, size, True, times
            size /= layout.degree(scattered)
        if rest := tuple(axis for axis in axes if axis not in scattered):
            yield "all-reduce", rest, phase, size, is_gradient, times

    def memory(self, layout: Layout) -> dict[str, int]:
        """Return the peak bytes per device, by memory term."""
        state = sum(self._at_rest(value, layout) for value in self.state)
        inputs = sum(layout.size(value) for value in self.inputs)
        values = self._peak(self.work.live, layout)
        return {
            "state": round(state),
            "inputs": round(inputs),
            "values": round(values),
            "peak": round(state + inputs + values),
        }

    def _peak(self, live: Live, layout: Layout) -> float:
        """Return the most bytes that a program's values (`live`) take on a device at once, without its arguments."""
        now = most = 0.0
        for made, called, gone in live.events:
            now += self._bytes(made, layout)
            most = max(most, now + max((self._peak(one, layout) for one in called), default=0.0))
            now -= self._bytes(gone, layout)
        return most

    def _bytes(self, values: Iterable[Value], layout: Layout) -> float:
        return sum(self._at_rest(value, layout) for value in values)


class _Local(NamedTuple):
    """A matmul on a device.

    times: executions per step. moves: how it communicates. sizes: m, k and n of [m, k] @ [k, n]; m includes batch dims.
    """

    product: Contraction
    times: int
    moves: Moves
    sizes: tuple[float, float, float]


def _local(product: Contraction, times: int, layout: Layout) -> _Local:
    moved, dims = moves(product, layout), product.result.dims
    splits, (left, right) = layout.split(dims), product.places
    columns = math.prod(
        layout.whole((dims[place],)) / layout.degree(splits[place])
        for place in right
        if place is not None and place not in left
    )
    split = layout.degree((*moved.partial, *moved.scattered))
    inner = max(1.0, layout.whole(product.inner) * product.window / split)
    whole = layout.elements(dims) * layout.degree(moved.scattered)
    return _Local(product, times, moved, (whole / columns, inner, columns))
