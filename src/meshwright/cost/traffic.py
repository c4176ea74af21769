"""Every collective of a train step: what it moves, over which mesh axes, in which phase, how often.

Weights are gathered over the axes that store them and their gradients reduce-scattered back (ZeRO-3, arXiv:1910.02054);
activations are gathered before and reduce-scattered after each pair of products that tp splits (arXiv:2205.05198), or
go round rings beside them; a split sequence gathers keys and values, sends them round a ring or exchanges heads for
tokens; experts exchange tokens; a pipeline hands the stream on; a split vocab reduces the softmax of the loss. Over pp,
counts are those of the stage with most layers.

Experts without a capacity are planned as in balance. But arrays have shapes before a routing is known, so they are made
for the worst there is: `workload.dropless_padding` times as many rows. XLA:CPU exchanges all of these. XLA:TPU and
XLA:GPU exchange the copies that there are, in a ragged all-to-all over ep; what is gathered over tp after it, and
scattered before the way back, is padded. With a capacity nothing is, and every target moves what is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from meshwright.cost.moves import times, tokens_of
from meshwright.cost.ticks import (
    Counted,
    Runs,
    all_runs,
    batch_axes,
    before_stages,
    is_lockstep,
    is_shared_before,
    of_stages,
    runs_of,
    slots_of,
    told_runs,
    vocab_axes,
    worked_runs,
)
from meshwright.cost.traffic_stages import (
    first_moves,
    last_moves,
    stage_moves,
    table_gathers,
    table_scatters,
)
from meshwright.cost.updates import update_moves
from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Collective, Phase
from meshwright.workload import (
    DEFAULT,
    IN_USE,
    RULES,
    Experts,
    Parameter,
    Rules,
    Strategy,
    Workload,
    dropless_padding,
    is_zigzag,
    leaves,
    local_parameter_shape,
    parameters,
    rules_of,
    sent_copies,
    sent_tokens,
    spec,
)


def step_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, counted: Counted = worked_runs
) -> tuple[Collective, ...]:
    """Every collective of a step with more than one device in its group, in bytes per device and step.

    counted: as `worked_runs`, or as `all_runs` with those that stages in lockstep run in the ticks of the bubble, whose
    time is a part of that; the same collectives in the same order, some more often.
    """
    return weight_collectives(workload, mesh, strategy, counted=counted) + activation_collectives(
        workload, mesh, strategy, counted=counted
    )


def weight_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy, *, counted: Counted = worked_runs
) -> tuple[Collective, ...]:
    """Those of a step's collectives that gather weights, and sum gradients and their norm."""
    moves = (
        move
        for path, parameter in leaves(parameters(workload.model))
        for move in _weight(path, parameter, workload, mesh, strategy, runs_of(parameter, mesh, strategy, counted))
    )
    return tuple(found for move in moves if (found := _live(move, mesh)))


def activation_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy, *, counted: Counted = worked_runs
) -> tuple[Collective, ...]:
    """Those of a step's collectives that move activations, and what a split vocab and the loss sum."""
    before, is_shared = before_stages(workload, mesh, strategy), is_shared_before(workload, mesh, strategy)
    workload = of_stages(workload, mesh, strategy)
    layers, parts = workload.model.num_layers, strategy.num_microbatches
    runs = counted(layers, mesh, strategy)
    # What is for all tokens runs for each microbatch in turn: as many bytes, more often. Layers are counted already.
    groups = (
        (_inside(workload, mesh, strategy), runs.layers, stage_layers(layers, mesh)),
        (_inside(*before) if before else (), runs.first, 1),
        (first_moves(workload, mesh, strategy, is_again=before is not None, is_shared=is_shared), runs.first, 1),
        (last_moves(workload, mesh, strategy), runs.last, 1),
    )
    moves = (
        _often(live, often, each, parts)
        for group, often, each in groups
        for move in group
        if (live := _live(move, mesh))
    )
    ends = (live for move in stage_moves(workload, mesh, strategy, runs) if (live := _live(move, mesh)))
    return (*moves, *ends)


def _inside(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """What moves inside layers that run alike, for all tokens of a device."""
    return chain.from_iterable(part(workload, mesh, strategy) for part in (_stream, _sequence, _experts))


def room_collectives(
    workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, is_ragged: bool
) -> tuple[Collective, ...]:
    """What the program of a step moves beyond its plan, as experts without a capacity have room for any routing.

    is_ragged: whether rows travel over ep by a ragged all-to-all, which moves what there is; XLA:CPU has none. Their
    shares, a number each, always travel in as much room as there could have to be.
    """
    if workload.model.experts is None or (more := dropless_padding(workload, mesh) - 1) == 0:
        return ()
    padded = ("experts dispatch", "experts combine", "routing shares")
    return tuple(
        replace(move, bytes=round(more * move.bytes))
        for move in activation_collectives(workload, mesh, strategy, counted=all_runs)
        if move.array in padded and not (is_ragged and move.kind == "all-to-all" and move.array.startswith("experts"))
    )


def branch_collectives(workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """What the text of a step's program says beyond its plan, as branches that few ticks take stand in it for all.

    Those of stages in lockstep with virtual ones, for what is before and after the layers.
    """
    run, told = (step_collectives(workload, mesh, strategy, counted=counted) for counted in (all_runs, told_runs))
    return tuple(
        replace(more, bytes=more.bytes - move.bytes, count=more.count - move.count)
        for move, more in zip(run, told, strict=True)
        if more.count > move.count
    )


def is_of_weights(move: Collective) -> bool:
    """Whether a collective gathers weights or scatters their gradients."""
    return move.kind in ("all-gather", "reduce-scatter") and "fsdp" in move.axes


def stage_layers(num_layers: int, mesh: MeshShape) -> int:
    """The layers of the stage that has most of so many."""
    return math.ceil(num_layers / mesh.pp)


def _often(move: Collective, often: int, each: int, parts: int) -> Collective:
    """A collective of all microbatches, counted `each` times, in so many parts, run `often` times each."""
    if often == each == parts == 1:
        return move
    return replace(move, count=move.count * often // each, bytes=move.bytes * often // (each * parts))


def _live(move: Collective, mesh: MeshShape) -> Collective | None:
    """The collective over its axes of more than one device; None where it never runs."""
    axes = tuple(axis for axis in move.axes if mesh.degree(axis) > 1)
    if not axes or not move.count:
        return None
    return move if axes == move.axes else replace(move, axes=axes)


def _weight(
    path: str, parameter: Parameter, workload: Workload, mesh: MeshShape, strategy: Strategy, runs: Runs
) -> Iterator[Collective]:
    """What the use of one parameter moves."""
    layers, size = parameter.num_layers, dtype_bytes(workload.compute_dtype)
    split = spec(parameter.axes, mesh=mesh, rules=_rules(mesh, strategy), what=path)
    shard = math.prod(local_parameter_shape(parameter, mesh=mesh, what=path)) // layers
    stored = tuple(axis for name in parameter.axes if name in IN_USE for axis in RULES[name])
    if strategy.zero_stage == 0:
        shard, split = shard * mesh.degree(stored), tuple(_but(dim, stored) for dim in split)
        stored = ()
    if "vocab" in parameter.axes and is_lockstep(mesh, strategy):
        shard = shard / mesh.pp
    batch = batch_axes(parameter, workload, mesh, strategy)
    if "norm" not in parameter.axes:
        yield from _uses(path, parameter, workload, mesh, strategy, runs, stored, size * shard)
        # A router works on the stream as it is split between blocks.
        along = rules_of(strategy)["residual_sequence" if "router" in parameter.axes else "sequence"]
        tokens = (*batch, *along)
        copies = tuple(axis for axis in tokens if axis not in stored and not any(axis in dim for dim in split))
        count = slots_of(parameter, mesh, strategy)
        yield times(count, "all-reduce", copies, "backward", _widened(strategy, size) * size * shard, path)
    else:
        # Kept whole: its gradient, in float32, is summed over every axis that splits the stream; part by part.
        count = runs.layers if parameter.is_stacked else runs.last
        if mesh.pp > 1 and not strategy.lockstep:
            count //= strategy.num_microbatches
        for axes in (rules_of(strategy)["residual_sequence"], batch):
            yield times(count, "all-reduce", axes, "backward", 4 * shard, path)
    yield from update_moves(path, parameter, split, mesh, strategy)


def _uses(
    path: str,
    parameter: Parameter,
    workload: Workload,
    mesh: MeshShape,
    strategy: Strategy,
    runs: Runs,
    stored: tuple[str, ...],
    shard_bytes: float,
) -> Iterator[Collective]:
    """A weight gathered over the axes that store it in shards, for each use, and its gradient scattered back.

    Below ZeRO-3 the updated parameters are gathered once a step, at its start. Below ZeRO-2 their gradients are
    scattered once, at its end.
    """
    once = slots_of(parameter, mesh, strategy)
    if parameter.is_stacked:
        ahead = again = back = runs.layers
    else:
        is_tied = workload.model.tied_embeddings
        ahead, again = table_gathers(path, runs, mesh, strategy, is_tied=is_tied)
        if path == "embedding" and before_stages(workload, mesh, strategy):
            again += runs.first
        back = table_scatters(path, runs, mesh, strategy, is_tied=is_tied)
    is_each, gathered = strategy.zero_stage == 3, shard_bytes * mesh.degree(stored)
    yield times(ahead if is_each else once, "all-gather", stored, "forward", gathered, path)
    yield times(again if is_each else 0, "all-gather", stored, "recompute", gathered, path)
    widened = _widened(strategy, dtype_bytes(workload.compute_dtype))
    scatters = back if strategy.zero_stage >= 2 else once
    yield times(scatters, "reduce-scatter", stored, "backward", widened * gathered, path)


def _widened(strategy: Strategy, size: float) -> float:
    """How much wider than the compute dtype, of `size` bytes, gradients are summed in."""
    return dtype_bytes(strategy.gradient_dtype) / size if strategy.gradient_dtype else 1


def _rules(mesh: MeshShape, strategy: Strategy) -> Rules:
    """The rules by which parameters are split for good: over pp too where stages are one program."""
    return {**RULES, "layers": ("pp",), "vocab": vocab_axes(mesh, strategy)} if is_lockstep(mesh, strategy) else RULES


def _but(dim: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a dim without some."""
    return tuple(axis for axis in dim if axis not in axes)


def _stream(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """The residual stream around the products that tp splits, once for attention and once for the mlp of a layer."""
    size = tokens_of(workload, mesh) * workload.model.embed * dtype_bytes(workload.compute_dtype)
    blocks = ("block",) if workload.model.parallel_blocks else ("attention", "mlp")
    if not strategy.sequence_parallel:
        yield from _whole_stream(workload, mesh, strategy, blocks, size)
        return
    layers = stage_layers(workload.model.num_layers, mesh)
    mlps, mixtures = _mlps(workload, mesh)
    for name, count in zip(blocks, (layers, mlps), strict=False):
        for move in _block(name, count, size, workload):
            yield _as_ring(move, mesh) if strategy.overlaps_tp else move
    yield from _block("experts", mixtures, size, workload)
    # The mlp's input follows from attention's output; what follows from the mlp's is the next block's own input.
    again = layers * (len(blocks) - (not strategy.reruns_blocks)) if workload.keeps_input_alone else 0
    output = times(again, "reduce-scatter", ("tp",), "recompute", size, "attention output")
    yield _as_ring(output, mesh) if strategy.overlaps_tp else output


def _block(name: str, count: int, size: float, workload: Workload) -> Iterator[Collective]:
    """The stream to the products of so many blocks, and what these add back to it."""
    again = 0 if workload.keeps_read else count
    yield times(count, "all-gather", ("tp",), "forward", size, f"{name} input")
    yield times(count, "reduce-scatter", ("tp",), "forward", size, f"{name} output")
    yield times(again, "all-gather", ("tp",), "recompute", size, f"{name} input")
    yield times(count, "all-gather", ("tp",), "backward", size, f"{name} output gradient")
    yield times(count, "reduce-scatter", ("tp",), "backward", size, f"{name} input gradient")


def _as_ring(move: Collective, mesh: MeshShape) -> Collective:
    """A gather or scatter over tp as the permutes of a ring beside the products that need it.

    S. Wang et al., ASPLOS 2023 (doi.org/10.1145/3567955.3567959).
    """
    hops = mesh.tp - 1
    return replace(move, kind="collective-permute", bytes=move.bytes * hops // mesh.tp, count=move.count * hops)


def _mlps(workload: Workload, mesh: MeshShape) -> tuple[int, int]:
    """The mlps of a stage, and the mixtures of experts, that want the stream whole: experts that ep splits do not."""
    layers, experts = stage_layers(workload.model.num_layers, mesh), workload.model.experts
    if experts is None:
        return layers, 0
    mixed = stage_layers(workload.model.num_layers - experts.num_dense_layers, mesh)
    return layers - mixed * (experts.shared_mlp == 0), mixed * (mesh.ep == 1)


def _whole_stream(
    workload: Workload, mesh: MeshShape, strategy: Strategy, blocks: tuple[str, ...], size: float
) -> Iterator[Collective]:
    """The stream that each device of tp has whole: outputs of blocks summed, backward the gradients of their inputs.

    Megatron-LM (arXiv:1909.08053, section 3); a recomputed block sums its output again (arXiv:2104.04473, section 3.5),
    but for the last one where a compiler sees that nothing needs it.
    """
    layers, (mlps, mixtures) = stage_layers(workload.model.num_layers, mesh), _mlps(workload, mesh)
    for name, count in (*zip(blocks, (layers, mlps), strict=False), ("experts", mixtures)):
        yield times(count, "all-reduce", ("tp",), "forward", size, f"{name} output")
        is_again = workload.keeps_input_alone and (strategy.reruns_blocks or name == "attention")
        yield times(count if is_again else 0, "all-reduce", ("tp",), "recompute", size, name)
        yield times(count, "all-reduce", ("tp",), "backward", size, f"{name} input gradient")


def _sequence(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """What brings the keys of a split sequence to its queries, by the strategy's method."""
    if strategy.attention == "scores" or strategy.sequence == "gather":
        return _keys_and_values(workload, mesh, strategy)
    return (_ring if strategy.sequence == "ring" else _exchanged_heads)(workload, mesh)


def _keys_and_values(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """Keys and values, gathered where the sequence is split: every query sees all of them.

    With them, where tokens do not lie in order, their positions: the same in all layers, so forward once, while each
    layer's backward takes its inputs as its own.
    """
    model = workload.model
    layers = stage_layers(model.num_layers, mesh)
    whole = workload.tokens // mesh.degree(RULES["batch"]) * model.num_kv_heads // mesh.tp
    again = 0 if workload.keeps_read else layers
    for name, dim in (("keys", model.query_key_dim), ("values", model.value_dim)):
        size = whole * dim * dtype_bytes(workload.compute_dtype)
        yield times(layers, "all-gather", ("sp",), "forward", size, name)
        yield times(again, "all-gather", ("sp",), "recompute", size, name)
        yield times(layers, "reduce-scatter", ("sp",), "backward", size, f"{name} gradient")
    if is_zigzag(mesh, strategy):
        positions = 4 * workload.tokens // mesh.degree(RULES["batch"])
        yield times(1, "all-gather", ("sp",), "forward", positions, "positions")
        yield times(layers, "all-gather", ("sp",), "recompute", positions, "positions")


def _ring(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """Keys and values with their positions, P - 1 times round a ring (arXiv:2310.01889).

    Backward again, and their gradients in float32 after them, as often: a device keeps its own part at home. Of two
    devices the compiler sees that backward sends what was just sent to recompute.
    """
    layers, tokens = stage_layers(workload.model.num_layers, mesh), tokens_of(workload, mesh)
    again = 0 if workload.keeps_read else layers
    backward = 0 if again and mesh.sp == 2 else layers
    phases: tuple[tuple[Phase, int], ...] = (("forward", layers), ("recompute", again), ("backward", backward))
    for name, heads, dim in _heads(workload, mesh)[1:3]:
        size = tokens * heads * dim
        for phase, count in phases:
            sent = size * dtype_bytes(workload.compute_dtype)
            yield times(count * (mesh.sp - 1), "collective-permute", ("sp",), phase, sent, name)
        count = layers * (mesh.sp - 1)
        yield times(count, "collective-permute", ("sp",), "backward", 4 * size, f"{name} gradient")
    for phase, count in phases:
        yield times(count * (mesh.sp - 1), "collective-permute", ("sp",), phase, 4 * tokens, "positions")


def _exchanged_heads(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """Queries, keys, values exchanged for all tokens of fewer heads, and what they mix back (arXiv:2309.14509)."""
    layers, tokens = stage_layers(workload.model.num_layers, mesh), tokens_of(workload, mesh)
    again = 0 if workload.keeps_read else layers
    for name, heads, dim in _heads(workload, mesh):
        size = tokens * heads * dim * dtype_bytes(workload.compute_dtype)
        yield times(layers, "all-to-all", ("sp",), "forward", size, name)
        yield times(again, "all-to-all", ("sp",), "recompute", size, name)
        yield times(layers, "all-to-all", ("sp",), "backward", size, f"{name} gradient")


def _heads(workload: Workload, mesh: MeshShape) -> tuple[tuple[str, int, int], ...]:
    """Attention's arrays, the heads of each on one device of tp, and the size of a head."""
    model = workload.model
    queries, keys = model.num_heads // mesh.tp, model.num_kv_heads // mesh.tp
    return (
        ("queries", queries, model.query_key_dim),
        ("keys", keys, model.query_key_dim),
        ("values", keys, model.value_dim),
        ("attention output", queries, model.value_dim),
    )


def _experts(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """Tokens on their way to their experts and back (GShard, arXiv:2006.16668): one copy for each active expert.

    Every device of tp exchanges its share of the stream; what arrives is gathered over tp, as each has a part of every
    expert, and what they add is summed. Backward needs what went there, but nothing that came back. Where experts are
    not split, tokens themselves are gathered over tp, as for any mlp.
    """
    experts = workload.model.experts
    if experts is None:
        return
    layers = stage_layers(workload.model.num_layers - experts.num_dense_layers, mesh)
    again = 0 if workload.keeps_read else layers
    if mesh.ep > 1:
        sent = sent_copies(workload, mesh) * workload.model.embed * dtype_bytes(workload.compute_dtype)
        yield from _there(layers, "forward", sent, mesh, "experts dispatch")
        yield from _there(again, "recompute", sent, mesh, "experts dispatch")
        yield from _back(layers, "forward", sent, mesh, "experts combine")
        yield from _there(layers, "backward", sent, mesh, "experts combine")
        yield from _back(layers, "backward", sent, mesh, "experts dispatch")
    yield from _routing(experts, layers, again, workload, mesh, strategy)
    yield from _load(experts, layers, mesh, strategy)


def _there(count: int, phase: Phase, sent: float, mesh: MeshShape, name: str) -> Iterator[Collective]:
    """What each device sends to others of ep, and what arrives gathered over tp."""
    yield times(count, "all-to-all", ("ep",), phase, sent, name)
    yield times(count, "all-gather", ("tp",), phase, sent * mesh.tp, name)


def _back(count: int, phase: Phase, sent: float, mesh: MeshShape, name: str) -> Iterator[Collective]:
    """The other way, summed over tp."""
    yield times(count, "reduce-scatter", ("tp",), phase, sent * mesh.tp, name)
    yield times(count, "all-to-all", ("ep",), phase, sent, name)


def _routing(
    experts: Experts, layers: int, again: int, workload: Workload, mesh: MeshShape, strategy: Strategy
) -> Iterator[Collective]:
    """What goes with the copies: the share of each in its token's result, and where they belong."""
    copies = sent_copies(workload, mesh)
    if mesh.ep > 1:
        yield from _there(layers, "forward", 4 * copies, mesh, "routing shares")
        yield from _there(again, "recompute", 4 * copies, mesh, "routing shares")
        yield from _back(layers, "backward", 4 * copies, mesh, "routing shares")
        if experts.capacity_factor is None:
            yield from _counts(experts, layers, again, mesh, strategy)
        return
    size = 4 * sent_tokens(workload, mesh) * experts.num_active
    if not strategy.sequence_parallel:
        yield times(layers, "all-reduce", ("tp",), "backward", size, "routing shares")
    else:
        yield times(2 * layers, "all-gather", ("tp",), "forward", size, "routing experts and shares")
        yield times(2 * again, "all-gather", ("tp",), "recompute", size, "routing experts and shares")
        yield times(layers, "reduce-scatter", ("tp",), "backward", size, "routing shares")


def _load(experts: Experts, layers: int, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """The copies of each expert, those dropped and its probability: of all layers at once, of stages layer by layer.

    For each microbatch as many bytes. Stages make them again for backward, as no policy keeps them.
    """
    load, tokens = 4 * 3 * experts.count * strategy.num_microbatches, _stream_axes(strategy)
    if not is_lockstep(mesh, strategy):
        yield times(1, "all-reduce", tokens, "forward", load * layers, "loss of imbalance")
        return
    yield times(layers, "all-reduce", tokens, "forward", load, "loss of imbalance")
    yield times(layers, "all-reduce", tokens, "recompute", load, "loss of imbalance")


def _stream_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes that split the stream between blocks."""
    return (*RULES["batch"], *rules_of(strategy)["residual_sequence"])


def _counts(experts: Experts, layers: int, again: int, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """How many copies each device has for every expert, and where those for each device start; of each microbatch."""
    each = 4 * strategy.num_microbatches
    runs: tuple[tuple[Phase, int], ...] = (("forward", layers), ("recompute", again))
    for phase, count in runs:
        yield times(count, "all-to-all", ("ep",), phase, each * (experts.count + mesh.ep), "routing counts")
        yield times(count, "all-gather", ("tp",), phase, each * experts.count * mesh.tp, "routing counts")
