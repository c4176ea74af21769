"""What moves at the ends of a stack of layers and between the stages of a pipeline, for one microbatch and for a step.

Without stages, or where each stage runs a program of its own (Megatron-LM, arXiv:2104.04473), the ends are the first
and the last stage's, and the stream goes from stage to stage. Stages in lockstep share the tables of both ends, the
vocab split over pp beside tp: what one of them holds of a stream is summed over pp to be on all.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.moves import times, tokens_of
from meshwright.cost.ticks import Runs, is_lockstep, schedule_of, stage_slots, vocab_axes
from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Collective, Phase
from meshwright.workload import RULES, Strategy, Workload, chunk_slots

KEPT_INPUTS = "kept inputs"
"""The inputs of layers that stages of 1F1B keep for each other."""


def first_moves(
    workload: Workload, mesh: MeshShape, strategy: Strategy, *, is_again: bool = False, is_shared: bool = False
) -> Iterator[Collective]:
    """What moves for the lookup before the layers, for all tokens of a device, and for the stream to the first stage.

    is_again: for layers that begin with the lookup. is_shared: whether each stage has a share of the sequences there.
    """
    size, share = _stream_bytes(workload, mesh), _stream_bytes(workload, mesh) / _shares(mesh, strategy)
    # What is looked up is summed onto shares of the sequence, then of the sequences, over other axes onto copies.
    split = {"tp": size} if strategy.sequence_parallel else {}
    split |= {"pp": share} if is_shared else {}
    copied = tuple(axis for axis in vocab_axes(mesh, strategy) if axis not in split)
    phases: tuple[Phase, ...] = ("forward", "recompute") if is_again else ("forward",)
    for phase in phases:
        for axis, whole in split.items():
            yield times(1, "reduce-scatter", (axis,), phase, whole, "embedding")
        yield times(1, "all-reduce", copied, phase, share / (mesh.pp if is_shared else 1), "embedding")
    for axis, whole in split.items():
        yield times(1, "all-gather", (axis,), "backward", whole, "embedding")
    if is_shared:
        yield times(1, "all-gather", ("pp",), "forward", share, "first stage's stream")
    if is_lockstep(mesh, strategy):
        kind = "reduce-scatter" if is_shared else "all-reduce"
        yield times(1, kind, ("pp",), "backward", share, "first stage's gradient")


def last_moves(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """What moves for the logits and the loss after the layers, for all tokens of a device.

    Of a split vocab's softmax each token's maximum, sum and target's logit, in float32. GPipe makes the logits again,
    but not the target's.
    """
    size, tokens, over = _stream_bytes(workload, mesh), tokens_of(workload, mesh), vocab_axes(mesh, strategy)
    lockstep = is_lockstep(mesh, strategy)
    again = lockstep and strategy.schedule == "gpipe"
    if not strategy.sequence_parallel:
        yield times(1, "all-reduce", over, "backward", size, "logits input gradient")
    else:
        yield times(1, "all-gather", ("tp",), "forward", size, "logits input")
        yield times(again, "all-gather", ("tp",), "recompute", size, "logits input")
        yield times(1, "reduce-scatter", ("tp",), "backward", size, "logits input gradient")
    if lockstep:
        share = size / _shares(mesh, strategy)
        yield times(1, "all-reduce", ("pp",), "forward", share, "last stage's stream")
        if strategy.sequence_parallel:
            yield times(1, "all-reduce", ("pp",), "backward", share, "logits input gradient")
    yield times(3, "all-reduce", over, "forward", 4 * tokens, "softmax")
    yield times(2 * again, "all-reduce", over, "recompute", 4 * tokens, "softmax")
    # A number for each microbatch; where each stage runs its own program, the last sums them first.
    parts = strategy.num_microbatches if mesh.pp == 1 or lockstep else 1
    for axes in (RULES["sequence"], RULES["batch"]):
        yield times(1, "all-reduce", axes, "forward", 4 * parts, "loss")


def stage_moves(workload: Workload, mesh: MeshShape, strategy: Strategy, runs: Runs) -> Iterator[Collective]:
    """The stream from stage to stage and its gradient back, and inputs that stages keep for each other, in a step.

    With virtual stages each stream passes all devices as often. Where tp has it whole between products, stages of their
    own programs hand on a share each, which is gathered again (arXiv:2104.04473, section 4.1).
    """
    if mesh.pp == 1:
        return
    size = _stream_bytes(workload, mesh) / strategy.num_microbatches
    if not is_lockstep(mesh, strategy):
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            yield times(runs.ticks, "collective-permute", ("pp",), phase, size / mesh.tp, "stream")
            if not strategy.sequence_parallel:
                yield times(runs.ticks, "all-gather", ("tp",), phase, size, "stream")
        return
    schedule, share, ticks = schedule_of(mesh, strategy), size / _shares(mesh, strategy), runs.ticks
    # Of two stages the compiler sees that the gradient of the last tick goes nowhere.
    is_seen = ticks == schedule.ticks and schedule.kind == "1f1b" and schedule.warm_up == 1
    yield times(ticks, "collective-permute", ("pp",), "forward", share, "stream")
    yield times(ticks - is_seen, "collective-permute", ("pp",), "backward", share, "stream")
    if schedule.is_balanced:
        slots = chunk_slots(workload.model.num_layers, mesh.pp, 1)
        yield times(ticks, "collective-permute", ("pp",), "forward", slots * share, KEPT_INPUTS)
    if experts := workload.model.experts:
        # Each stage has the loads of its own layers, and the losses that these add.
        slots = mesh.pp * stage_slots(workload.model.num_layers, mesh, strategy)
        yield times(1, "all-reduce", ("pp",), "forward", 4, "loss of imbalance")
        yield times(1, "all-gather", ("pp",), "forward", 4 * 3 * experts.count * slots, "load of experts")


def table_gathers(path: str, runs: Runs, mesh: MeshShape, strategy: Strategy, *, is_tied: bool) -> tuple[int, int]:
    """How often a step gathers a table for a stage's ends where its parameters are stored in shards: forward, again.

    In lockstep for each lookup and for all logits of a microbatch, which GPipe makes again.
    """
    uses = table_scatters(path, runs, mesh, strategy, is_tied=is_tied)
    is_again = is_lockstep(mesh, strategy) and strategy.schedule == "gpipe" and (is_tied or path != "embedding")
    return uses, runs.last if is_again else 0


def table_scatters(path: str, runs: Runs, mesh: MeshShape, strategy: Strategy, *, is_tied: bool) -> int:
    """How often a step sums the gradient of a table: once for each lookup, and for each use by logits."""
    if not is_lockstep(mesh, strategy):
        return runs.last
    return (runs.first if path == "embedding" else 0) + (runs.last if is_tied or path != "embedding" else 0)


def _stream_bytes(workload: Workload, mesh: MeshShape) -> float:
    """The stream of all tokens of a device, whole over tp."""
    return tokens_of(workload, mesh) * workload.model.embed * dtype_bytes(workload.compute_dtype)


def _shares(mesh: MeshShape, strategy: Strategy) -> int:
    """The devices of tp that share a stream between products."""
    return mesh.tp if strategy.sequence_parallel else 1
