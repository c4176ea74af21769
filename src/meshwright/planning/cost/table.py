"""Table of a step's ops: a row for each matmul with its collectives, and for each collective that has no matmul.

A matmul is shown as `X[B_dp, S, D] @ Wquery[D_fsdp, K_tp, G, H] -> query[B_dp, S, K_tp, G, H]`: arrays as the matmul
uses them; a weight that is gathered for it, and a gradient that is reduce-scattered after it, as stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.expression import Einsum
from meshwright.description.step.ir import (
    Array,
    AttentionOp,
    Communicate,
    Dim,
    Extents,
    Matmul,
    Region,
    Repeat,
    Step,
    axes_of,
)
from meshwright.description.step.passes.pipeline import UPDATE
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import sized_collectives
from meshwright.planning.cost.flops import AttentionProduct, attention_products, scores_share
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.roofline import intensity, op_seconds
from meshwright.record import Bound, Collective, Phase

LETTERS = (
    "B batch, S sequence, T sequence of keys, D stream, K kv heads, G query heads a kv head, H head dim, F mlp,"
    " V vocab, E experts, R rows of an expert or a latent, C copies sent to experts, L latents, P positions,"
    " N scale of a norm, J rank of an adapter; d before a name: its gradient"
)
"""Meaning of the letters in the notation."""

HALVES = 2
"""The number of parts into which attention may split a sequence.

Queries of the first part attend to no key of the second, so three of the four matmuls between parts are computed.
"""


class LocalProduct(NamedTuple):
    """A batched matmul on one device, in local sizes: `repeats` times [rows, inner] @ [inner, columns]."""

    repeats: float
    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """Flops of all repeats, a multiply and an add each."""
        return 2 * math.prod(self)

    @property
    def operands(self) -> float:
        """The number of elements of both operands, over all repeats."""
        return self.repeats * self.inner * (self.rows + self.columns)

    @property
    def result(self) -> float:
        """The number of elements of the result, over all repeats."""
        return self.repeats * self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """One row of the table: an op on one device, with times at full rate.

    Attributes:
        times: executions per step; over pp the mean of the stages.
        times_recomputed: executions per step that recompute the op for backward.
        product: the matmul's local sizes; None for a collective without a matmul.
        memory: flops per byte of HBM traffic.
        network: flops per byte of the op's longest collective.
        network_wanted: flops that the chip executes in the time of one byte of this collective. If `network` is lower,
            the collective takes longer than the matmul.
        collectives: the op's collectives, with bytes and seconds of all executions in a step.
    """

    name: str
    phase: Phase
    notation: str
    times: float
    times_recomputed: float = 0.0
    product: LocalProduct | None = None
    is_attention: bool = False
    memory: float | None = None
    network: float | None = None
    network_wanted: float | None = None
    bound: Bound | None = None
    collectives: tuple[Collective, ...] = ()

    @property
    def flops(self) -> float:
        """Flops of one execution."""
        return self.product.flops if self.product else 0.0

    @property
    def step_flops(self) -> float:
        """Flops of all executions in a step."""
        return (self.times + self.times_recomputed) * self.flops

    @property
    def single_collectives(self) -> tuple[Collective, ...]:
        """The collectives with bytes and seconds of one execution each; equal collectives of several phases are one."""
        found: dict[tuple[str, tuple[str, ...], str, int], Collective] = {}
        for move in self.collectives:
            each = round(move.bytes / move.count)
            key = move.kind, move.axes, move.array, each
            if key in found:
                found[key] = replace(found[key], count=found[key].count + move.count)
            else:
                found[key] = replace(move, bytes=each, seconds=(move.seconds or 0.0) / move.count)
        return tuple(found.values())


def op_table(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> tuple[OpRow, ...]:
    """Return a row for each matmul of a step and for each collective without a matmul, in forward order.

    The rows' flops add up to `step_flops`, their collectives to the executed `step_collectives`. A recomputed matmul is
    counted in the row of the forward pass.
    """
    return _Table(workload, mesh, system, strategy).rows()


_Place = tuple[str, str, str, Phase]
"""What identifies a matmul of a step: (region, name, role, phase)."""


class _Table:
    """Builder of the rows of a step's ops."""

    def __init__(self, workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> None:
        self.workload, self.mesh, self.system, self.strategy = workload, mesh, system, strategy
        self.step: Step = train_step(workload, mesh, strategy)
        self.extents: Extents = self.step.extents
        self.layout: MeshPlacement = lay_mesh(system, mesh.layout)
        self.products = {_place(op) for op in self.step.ops.matmuls}
        self.collectives: dict[_Place, list[Collective]] = {}
        self.alone: list[tuple[Communicate, Collective]] = []
        moves = sized_collectives(self.step.communication, self.step, workload, strategy, "executed")
        for op, move in moves:
            # Seconds are those of all runs, at the full rate of the links.
            once = collective_seconds(move.kind, move.bytes / move.count, self.layout.placement(move.axes))
            timed = replace(move, seconds=once.seconds * move.count)
            if (place := self._owner(op)) is None:
                self.alone.append((op, timed))
            else:
                name = _weight_name(op.name, is_gradient=op.phase == "backward")
                self.collectives.setdefault(place, []).append(replace(timed, array=name))

    def rows(self) -> tuple[OpRow, ...]:
        """Return the rows; equal ops share a row, and a recomputed op is added to the row of its forward op."""
        found: dict[tuple[str, str, bool], OpRow] = {}
        for row in self._each():
            key = row.name, row.notation, row.phase == "backward"
            if (first := found.get(key)) is None:
                found[key] = row
                continue
            moves = _added_up((*first.collectives, *row.collectives))
            if row.phase == "recompute":
                found[key] = replace(first, times_recomputed=first.times_recomputed + row.times, collectives=moves)
            else:
                found[key] = replace(first, times=first.times + row.times, collectives=moves)
        return tuple(found.values())

    def _each(self) -> Iterator[OpRow]:
        """Yield a row for each matmul and each collective without one, in step order, recomputed ops included."""
        alone = {id(op): (op, move) for op, move in self.alone}
        for op in (*self.step.ops.ops, *self.step.stages):
            match op:
                case Matmul():
                    yield self._matmul(op)
                case AttentionOp():
                    yield from self._attention(op)
                case Communicate() if id(op) in alone:
                    yield _move(*alone[id(op)])
                case _:
                    pass

    def _owner(self, op: Communicate) -> _Place | None:
        """Return the place of the matmul whose weight or gradient a collective sends; None if it has its own row."""
        if not op.of_weight:
            return None
        region = op.region.name
        places: dict[Phase, list[_Place]] = {
            "forward": [(region, op.name, "result", "forward")],
            # A weight whose matmul is not recomputed is gathered again for the gradient of its input.
            "recompute": [
                (region, op.name, "result", "recompute"),
                (region, op.name, "input_gradient", "backward"),
            ],
            "backward": [(region, op.name, "weight_gradient", "backward")],
        }
        return next((place for place in places.get(op.phase, []) if place in self.products), None)

    def _matmul(self, op: Matmul) -> OpRow:
        """Return the row of a matmul with a weight, or of one of its gradients."""
        # A weight that a layer uses twice is sent for the first of its matmuls.
        moves = self.collectives.pop(_place(op), [])
        local = self.extents.local_dims
        rows, inner, columns = local(op.rows), local(op.inner), local(op.columns)
        sizes = {
            "result": (rows, inner, columns),
            "input_gradient": (rows, columns, inner),
            "weight_gradient": (inner, rows, columns),
        }[op.role]
        dtype = (self.strategy.matmul_dtype if op.is_rounded else None) or self.workload.compute_dtype
        row = OpRow(
            name=op.name,
            phase=op.phase,
            notation=str(_matmul_notation(op, is_stored=bool(moves))),
            times=self._times(op.region),
            product=LocalProduct(local(op.experts), *sizes),
            collectives=tuple(moves),
        )
        return self._priced(row, dtype)

    def _attention(self, op: AttentionOp) -> Iterator[OpRow]:
        """Yield the rows of attention's matmuls; if the sequence is split in halves, each row counts three matmuls."""
        is_fused = self.strategy.attention != "scores"
        parts = HALVES if scores_share(self.workload, self.mesh, self.strategy) < 1 else 1
        each = parts * (parts + 1) // 2
        shared = [dim for dim in op.query.dims[2:-1] if dim.letter in {other.letter for other in op.key.dims}]
        local, keys = self.extents.local_dims, self.extents.sizes["S"] / parts
        count = local((op.query.dims[0], *shared))
        rows = self.extents.local(op.query) / op.qk_dim / count / parts
        for product in attention_products(op, self.step, is_fused=is_fused):
            dim = op.qk_dim if product.kind == "scores" else op.value_dim
            makes_scores = (product.kind == "scores") == (product.role == "result")
            if product.role == "right_gradient":
                sizes = LocalProduct(count, keys, rows, dim)
            elif makes_scores:
                sizes = LocalProduct(count, rows, dim, keys)
            else:
                sizes = LocalProduct(count, rows, keys, dim)
            row = OpRow(
                name=f"{op.region.name}.{product.kind}",
                phase=op.phase,
                notation=str(_attention_notation(op, product)),
                times=each * self._times(op.region),
                product=sizes,
                is_attention=True,
            )
            # A fused kernel keeps scores on the chip: it moves arrays of the queries' size, and keys or values.
            moved = count * dim * (rows + keys) if is_fused else None
            yield self._priced(row, self.workload.compute_dtype, moved)

    def _times(self, region: Region) -> float:
        """Return how often a device runs the ops of a region per step; over pp the mean of the stages."""
        repeat: Repeat = self.step.repeats[region.name]
        return repeat.once if region.is_once else repeat.mean

    def _priced(self, row: OpRow, dtype: str, elements: float | None = None) -> OpRow:
        """Return the row of a matmul with its intensities and bound.

        elements: the number of elements of HBM traffic; None for those of operands and result.
        """
        assert row.product
        moved = row.product.operands + row.product.result if elements is None else elements
        nbytes = moved * dtype_bytes(self.workload.compute_dtype)
        op = op_seconds(row.flops, nbytes, self.system, dtype=dtype)
        moves = row.single_collectives
        times: dict[Bound, float] = {
            "compute": op.flops_seconds,
            "memory": op.memory_seconds,
            "communication": math.fsum(move.seconds or 0.0 for move in moves),
        }
        row = replace(row, memory=intensity(row.flops, nbytes), bound=max(times, key=times.__getitem__))
        if not moves:
            return row
        longest = max(moves, key=lambda move: move.seconds or 0.0)
        wanted = self.system.peak(dtype) * (longest.seconds or 0.0) / longest.bytes
        return replace(row, network=intensity(row.flops, longest.bytes), network_wanted=wanted)


def _place(op: Matmul) -> _Place:
    """Return what identifies a matmul of a step."""
    return op.region.name, op.name, op.role, op.phase


def _move(op: Communicate, move: Collective) -> OpRow:
    """Return the row of a collective without a matmul."""
    if op.region.name == UPDATE:
        return OpRow(name=UPDATE, phase=op.phase, notation=op.array.name, times=move.count, collectives=(move,))
    is_gradient = op.phase == "backward"

    def text(array: Array) -> str:
        if op.of_weight and op.before:
            name = _weight_name(array.name, is_gradient=is_gradient)
        else:
            name = f"d{array.name}" if is_gradient else array.name
        return str(_array(name, array.dims, array.unreduced))

    notation = f"{text(op.before)} -> {text(op.after)}" if op.before and op.after else text(op.array)
    name = op.name if op.of_weight or op.name.startswith(op.region.name) else f"{op.region.name}.{op.name}"
    return OpRow(name=name, phase=op.phase, notation=notation, times=move.count, collectives=(move,))


def _added_up(moves: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the collectives, with those of equal kind, axes, phase and array added up to one."""
    found: dict[tuple[object, ...], Collective] = {}
    for move in moves:
        key = move.kind, move.axes, move.phase, move.array
        if (first := found.get(key)) is None:
            found[key] = move
        else:
            seconds = (first.seconds or 0.0) + (move.seconds or 0.0)
            found[key] = replace(first, bytes=first.bytes + move.bytes, count=first.count + move.count, seconds=seconds)
    return tuple(found.values())


def _matmul_notation(op: Matmul, *, is_stored: bool) -> Einsum:
    """Return a matmul with a weight in the notation.

    is_stored: show the weight, or its gradient, with its stored sharding.
    """
    used = {dim.letter: dim for dim in (*op.experts, *op.inner, *op.columns)}
    letters = [dim.letter for dim in op.stored or (*op.columns, *op.inner)]
    weight = op.stored if is_stored else tuple(used[letter] for letter in letters)
    # The residual stream, normalised or not, is X; a result that is added to it is Y.
    source = "X" if op.inner[0].letter == "D" else op.source.removesuffix(" as read")
    target = "Y" if op.columns[-1].letter == "D" else op.target
    of_inner, of_columns = axes_of(op.inner), axes_of(op.columns)
    # An expert's rows are local: each device that shares the expert's weight has its own rows.
    rows = tuple(dim._replace(axes=op.pending) for dim in op.rows) if op.experts else op.rows
    X = _array(source, (*op.experts, *rows, *op.inner))
    dY = _array(f"d{target}", (*op.experts, *rows, *op.columns))
    W = _array(op.right or _weight_name(op.name), weight)
    match op.role:
        case "result":
            return Einsum((X, W), _array(target, (*op.experts, *rows, *op.columns), of_inner))
        case "input_gradient":
            return Einsum((dY, W), _array(f"d{source}", (*op.experts, *rows, *op.inner), of_columns))
        case "weight_gradient":
            pending = () if is_stored else op.pending
            return Einsum((X, dY), _array(f"d{W.name}", weight, pending))


def _attention_notation(op: AttentionOp, product: AttentionProduct) -> Einsum:
    """Return one of attention's matmuls in the notation."""
    keys = Dim("T", None)
    query, output = _array(op.query.name, op.query.dims), _array(op.output.name, op.output.dims)
    held = op.key if product.kind == "scores" else op.value
    right = _array(held.name, (held.dims[0], keys, *held.dims[2:]))
    scores = _array("scores" if product.kind == "scores" else "weights", (*op.query.dims[:-1], keys))
    left, result = (query, scores) if product.kind == "scores" else (scores, output)
    gradient = _gradient(result)
    match product.role:
        case "result":
            return Einsum((left, right), result)
        case "left_gradient":
            return Einsum((gradient, right), _gradient(left))
        case "right_gradient":
            return Einsum((gradient, left) if product.kind == "scores" else (left, gradient), _gradient(right))


def _array(name: str, dims: Iterable[Dim], unreduced: tuple[str, ...] = ()) -> ShardedArray:
    """Return an array in the notation."""
    dims = tuple(dims)
    letters, axes = tuple(dim.letter for dim in dims), tuple(dim.axes for dim in dims)
    return ShardedArray(name.replace(" ", "_"), letters, axes, unreduced)


def _gradient(array: ShardedArray) -> ShardedArray:
    """Return the gradient of an array, with the array's sharding."""
    return replace(array, name=f"d{array.name}")


def _weight_name(path: str, *, is_gradient: bool = False) -> str:
    """Return a weight's name in the notation: `Wquery` for `layers.query`, `dWquery` for its gradient."""
    return f"{'d' if is_gradient else ''}W{path.rpartition('.')[2]}"
