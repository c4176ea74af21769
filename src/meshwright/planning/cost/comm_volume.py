"""Communication volume: every collective of a step, in bytes per device and step (`record.Collective`).

Dropless experts are planned for balanced routing. But array shapes are fixed before routing is known, so arrays have
rows for the worst case: `step.token_routing.dropless_padding` times the balanced number. XLA:CPU sends all rows.
XLA:TPU and XLA:GPU send only actual rows, by a ragged all-to-all over ep; the gather over tp that follows, and the
scatter on the way back, include padding. With a capacity factor there is no padding, and every compiler sends the
predicted bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.ir import Communicate, Extents, Repeat, Step, Width
from meshwright.description.step.passes.nodes import IMBALANCE
from meshwright.description.step.passes.pipeline import UPDATE
from meshwright.description.step.passes.shard_ends import LOSS
from meshwright.description.step.reference import reference_pass
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.token_routing import dropless_padding
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.record import Collective

Counted = Literal["useful", "executed", "static"]
"""Which runs of an op in a step are counted; each name is a field of `step.ir.Repeat`."""


def step_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, counted: Counted = "useful"
) -> tuple[Collective, ...]:
    """Return every collective of a step with more than one device in its group, in bytes per device and step.

    counted: `useful` counts the executions on a step's microbatches; `executed` adds those of lockstep stages in bubble
    ticks, whose time is part of the bubble; `static` counts every branch as taken in every tick, as the HLO text does.
    The collectives and their order are the same for `useful` and `executed`.
    """
    step = train_step(workload, mesh, strategy)
    return _collectives(step.communication, step, workload, strategy, counted)


def reference_collectives(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collectives of a step's frozen reference model, with phase `reference`, over the axes of its own mesh.

    They are those of a forward pass up to the logits, in bytes per device and step. Without a reference: empty.
    """
    own = reference_pass(workload, mesh, strategy)
    return () if own is None else _of_reference(step_collectives(*own))


def _of_reference(moves: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the collectives of a forward pass up to the logits, without those of the loss, with phase `reference`."""
    forward = (move for move in moves if move.phase == "forward" and move.array not in (LOSS, IMBALANCE))
    return tuple(replace(move, phase="reference") for move in forward)


def weight_collectives(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collectives that gather weights, and that reduce gradients and their norm."""
    step = train_step(workload, mesh, strategy)
    return _collectives((op for op in step.communication if op.of_weight), step, workload, strategy)


def weight_moves(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[tuple[Collective, bool], ...]:
    """Return each collective of weights or gradients, and whether it runs once per step, not once per microbatch."""
    step = train_step(workload, mesh, strategy)
    return _moves((op for op in step.communication if op.of_weight), step, workload, strategy)


def step_moves(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[tuple[Collective, bool], ...]:
    """Return each collective of a step, and whether it runs once per step, not once per microbatch."""
    step = train_step(workload, mesh, strategy)
    return _moves(step.communication, step, workload, strategy)


def _moves(
    ops: Iterable[Communicate], step: Step, workload: Workload, strategy: Strategy
) -> tuple[tuple[Collective, bool], ...]:
    """Return, for each op that sends bytes, its collective and whether it runs once per step, not per microbatch."""
    sized = sized_collectives(ops, step, workload, strategy, "useful")
    return tuple((move, op.region.is_once or op.region.name == UPDATE) for op, move in sized)


def activation_moves(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[tuple[Collective, bool], ...]:
    """Return each collective of activations or the loss, and whether it runs once per step, not per microbatch."""
    step = train_step(workload, mesh, strategy)
    return _moves((op for op in step.communication if not op.of_weight), step, workload, strategy)


def dropless_padding_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, is_ragged: bool
) -> tuple[Collective, ...]:
    """Return the collectives that send padding of dropless experts, in bytes of padding per device and step.

    A plan counts balanced routing only, but a program allocates rows for any routing.

    is_ragged: whether rows are exchanged over ep by a ragged all-to-all, which sends only actual rows; XLA:CPU has
    none. Routing weights, one number per row, are always exchanged with padding.
    """
    own = reference_pass(workload, mesh, strategy)
    beside = () if own is None else _of_reference(_dropless_padding(*own, is_ragged=is_ragged))
    return (*_dropless_padding(workload, mesh, strategy, is_ragged=is_ragged), *beside)


def _dropless_padding(
    workload: Workload, mesh: MeshShape, strategy: Strategy, *, is_ragged: bool
) -> tuple[Collective, ...]:
    """Return `dropless_padding_collectives` of the trained model only, without those of a reference model."""
    if workload.model.experts is None or (more := dropless_padding(workload, mesh) - 1) == 0:
        return ()
    step = train_step(workload, mesh, strategy)

    def is_padded(op: Communicate) -> bool:
        is_of_copies = not {"C", "CT"}.isdisjoint(op.array.symbols)
        return is_of_copies and not (is_ragged and op.kind == "all-to-all" and op.array.width == "compute")

    padded = _collectives(filter(is_padded, step.communication), step, workload, strategy, "executed")
    return tuple(replace(move, bytes=round(more * move.bytes)) for move in padded)


def untaken_branch_collectives(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collectives that the HLO text has but a device does not execute: most pipeline ticks skip them."""
    step = train_step(workload, mesh, strategy)

    def untaken(op: Communicate, repeat: Repeat) -> int:
        return _num_runs(op, repeat, "static") - _num_runs(op, repeat, "executed")

    return tuple(move for _, move in _sized(step.communication, step, workload, strategy, untaken))


def is_of_weights(move: Collective) -> bool:
    """Whether a collective gathers weights or scatters their gradients."""
    return move.kind in ("all-gather", "reduce-scatter") and "fsdp" in move.axes


def _collectives(
    ops: Iterable[Communicate], step: Step, workload: Workload, strategy: Strategy, counted: Counted = "useful"
) -> tuple[Collective, ...]:
    """Return a collective for each op that sends bytes, in bytes per device and step."""
    return tuple(move for _, move in sized_collectives(ops, step, workload, strategy, counted))


def sized_collectives(
    ops: Iterable[Communicate], step: Step, workload: Workload, strategy: Strategy, counted: Counted
) -> Iterator[tuple[Communicate, Collective]]:
    """Yield (op, its collective) for each op that sends bytes, with the bytes and runs per device and step."""
    return _sized(ops, step, workload, strategy, lambda op, repeat: _num_runs(op, repeat, counted))


def _sized(
    ops: Iterable[Communicate],
    step: Step,
    workload: Workload,
    strategy: Strategy,
    count: Callable[[Communicate, Repeat], int],
) -> Iterator[tuple[Communicate, Collective]]:
    """Yield (op, its collective) for each op that sends bytes; the collective has its bytes and its runs in a step.

    count: returns how often a step runs an op, from the op and the repeats of its region (microbatches, layers).
    """
    compute = dtype_bytes(workload.compute_dtype)
    gradient = dtype_bytes(strategy.gradient_dtype or workload.compute_dtype)
    widths: dict[Width, float] = {"compute": compute, "float32": 4, "gradient": gradient}
    degrees = vars(step.extents.mesh)
    for op in ops:
        runs = count(op, step.repeats[op.region.name]) * op.times
        if op.is_ring:
            runs *= step.extents.mesh.degree(op.axes) - 1
        if runs and any(degrees[axis] > 1 for axis in op.axes):
            # Bytes per microbatch may be a fraction: stages add up the losses of all microbatches before they send.
            size = int(moved_bytes(op, step.extents, widths) * runs + 1e-6)
            yield op, Collective(kind=op.kind, axes=op.axes, phase=op.phase, bytes=size, count=runs, array=op.name)


def moved_bytes(op: Communicate, extents: Extents, widths: Mapping[Width, float]) -> float:
    """Return the bytes per device of one run of a collective; widths: bytes per element, by an array's `width`."""
    return sum(widths[array.width] * extents.local(array) for array in (op.array, *op.beside))


def _num_runs(op: Communicate, repeat: Repeat, counted: Counted) -> int:
    """Return how often a device runs an op in a step. repeat: the runs of the op's region, by kind of count."""
    if op.region.is_once:
        return repeat.once
    return getattr(repeat, counted) - (op.skipped if counted != "useful" else 0)
