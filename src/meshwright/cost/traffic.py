"""Every collective of a train step: what it moves, over which mesh axes, in which phase, how often.

Weights are gathered over the axes that store them and their gradients reduce-scattered back (ZeRO-3, arXiv:1910.02054);
activations are gathered before and reduce-scattered after each pair of products that tp splits (arXiv:2205.05198); a
split sequence gathers keys and values; experts exchange tokens; a pipeline hands the stream on; a split vocab reduces
the softmax of the loss. Over pp, counts are those of the stage with most layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Collective, Kind, Phase
from meshwright.workload import (
    DEFAULT,
    IN_USE,
    RULES,
    Parameter,
    Strategy,
    Workload,
    leaves,
    local_parameter_shape,
    parameters,
    spec,
    token_axes,
)


def step_collectives(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> tuple[Collective, ...]:
    """Every collective of a step with more than one device in its group, in bytes per device and step."""
    parts = strategy.num_microbatches
    moves = [
        *(
            move
            for path, parameter in leaves(parameters(workload.model))
            for move in _weight(path, parameter, workload, mesh, strategy)
        ),
        *_split(_stream(workload, mesh, strategy), parts),
        *_split(_keys_and_values(workload, mesh), parts),
        *_split(_experts(workload, mesh), parts),
        *_split(_stages(workload, mesh, strategy), parts),
        *_split(_loss(workload, mesh), parts),
    ]
    return tuple(found for move in moves if (found := _live(move, mesh)))


def stage_layers(num_layers: int, mesh: MeshShape) -> int:
    """The layers of the stage that has most of so many."""
    return math.ceil(num_layers / mesh.pp)


def _live(move: Collective, mesh: MeshShape) -> Collective | None:
    """The collective over its axes of more than one device; None where there are none, or where it never runs."""
    axes = tuple(axis for axis in move.axes if mesh.degrees[axis] > 1)
    return replace(move, axes=axes) if axes and move.count else None


def _split(moves: Iterator[Collective], parts: int) -> Iterator[Collective]:
    """Collectives of a step's activations, run for each of its microbatches in turn: as many bytes, more often."""
    return (replace(move, count=move.count * parts) for move in moves)


def _weight(
    path: str, parameter: Parameter, workload: Workload, mesh: MeshShape, strategy: Strategy
) -> Iterator[Collective]:
    """What the use of one parameter moves."""
    layers = parameter.num_layers
    shard = math.prod(local_parameter_shape(parameter, mesh=mesh, what=path)) // layers
    count = stage_layers(layers, mesh) if "layers" in parameter.axes else 1
    if "norm" in parameter.axes:
        # Kept whole: its gradient, in float32, is summed over every axis that splits the stream.
        for axes in (RULES["residual_sequence"], RULES["batch"]):
            yield _times(count, "all-reduce", axes, "backward", 4 * shard, path)
        return
    size = dtype_bytes(workload.compute_dtype)
    split = spec(parameter.axes, mesh=mesh, what=path)
    stored = tuple(axis for name in parameter.axes if name in IN_USE for axis in RULES[name])
    gathered = size * shard * mesh.degree(stored)
    if strategy.zero_stage == 0:
        yield _times(count, "all-reduce", stored, "backward", gathered, path)
    else:
        # Below ZeRO-3 the updated parameters are gathered once a step, at its start; else for every microbatch.
        parts = strategy.num_microbatches if strategy.zero_stage == 3 else 1
        yield _times(count * parts, "all-gather", stored, "forward", gathered, path)
        if strategy.zero_stage == 3 and "layers" in parameter.axes:
            yield _times(count * parts, "all-gather", stored, "recompute", gathered, path)
        yield _times(count * parts, "reduce-scatter", stored, "backward", gathered, path)
    copies = tuple(axis for axis in token_axes() if axis not in stored and not any(axis in dim for dim in split))
    yield _times(count, "all-reduce", copies, "backward", size * shard, path)
    for dim in split:
        yield _times(1, "all-reduce", dim, "update", 4, f"norm of the gradient of {path}")


def _stream(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """The residual stream around the products that tp splits, once for attention and once for the mlp of a layer."""
    size = _tokens(workload, mesh) * workload.model.embed * dtype_bytes(workload.compute_dtype)
    blocks = ("block",) if workload.model.parallel_blocks else ("attention", "mlp")
    if not strategy.sequence_parallel:
        yield from _whole_stream(workload, mesh, blocks, size)
        return
    layers, remat = stage_layers(workload.model.num_layers, mesh), workload.remat
    yield _times(1, "reduce-scatter", ("tp",), "forward", size, "embedding")
    yield _times(1, "all-gather", ("tp",), "backward", size, "embedding")
    for name in blocks:
        yield _times(layers, "all-gather", ("tp",), "forward", size, f"{name} input")
        yield _times(layers, "reduce-scatter", ("tp",), "forward", size, f"{name} output")
        yield _times(layers if remat != "none" else 0, "all-gather", ("tp",), "recompute", size, f"{name} input")
        yield _times(layers, "all-gather", ("tp",), "backward", size, f"{name} output gradient")
        yield _times(layers, "reduce-scatter", ("tp",), "backward", size, f"{name} input gradient")
    # The mlp's input follows from attention's output; what follows from the mlp's is the next block's own input.
    again = layers * (len(blocks) - 1) if remat == "block" else 0
    yield _times(again, "reduce-scatter", ("tp",), "recompute", size, "attention output")
    yield _times(1, "all-gather", ("tp",), "forward", size, "logits input")
    yield _times(1, "reduce-scatter", ("tp",), "backward", size, "logits input gradient")


def _whole_stream(workload: Workload, mesh: MeshShape, blocks: tuple[str, ...], size: float) -> Iterator[Collective]:
    """The stream that each device of tp has whole: outputs of blocks summed, backward the gradients of their inputs.

    Megatron-LM (arXiv:1909.08053, section 3); a recomputed block sums its output again (arXiv:2104.04473, section 3.5).
    """
    layers = stage_layers(workload.model.num_layers, mesh)
    yield _times(1, "all-reduce", ("tp",), "forward", size, "embedding")
    for name in blocks:
        yield _times(layers, "all-reduce", ("tp",), "forward", size, f"{name} output")
        yield _times(layers if workload.remat == "block" else 0, "all-reduce", ("tp",), "recompute", size, name)
        yield _times(layers, "all-reduce", ("tp",), "backward", size, f"{name} input gradient")
    yield _times(1, "all-reduce", ("tp",), "backward", size, "logits input gradient")


def _keys_and_values(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """Keys and values, gathered where the sequence is split: every query sees all of them."""
    model = workload.model
    layers = stage_layers(model.num_layers, mesh)
    whole = workload.tokens // mesh.degree(RULES["batch"]) * model.num_kv_heads // mesh.tp
    again = layers if workload.remat != "none" else 0
    for name, dim in (("keys", model.query_key_dim), ("values", model.value_dim)):
        size = whole * dim * dtype_bytes(workload.compute_dtype)
        yield _times(layers, "all-gather", ("sp",), "forward", size, name)
        yield _times(again, "all-gather", ("sp",), "recompute", size, name)
        yield _times(layers, "reduce-scatter", ("sp",), "backward", size, f"{name} gradient")


def _experts(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """Tokens on their way to their experts and back (GShard, arXiv:2006.16668): one copy for each active expert.

    Every device of tp moves its share of the stream.
    """
    experts = workload.model.experts
    if experts is None:
        return
    layers = stage_layers(workload.model.num_layers - experts.num_dense_layers, mesh)
    copies = _tokens(workload, mesh) * experts.num_active / mesh.tp
    size = copies * workload.model.embed * dtype_bytes(workload.compute_dtype)
    runs: tuple[tuple[Phase, int], ...] = (
        ("forward", layers),
        ("recompute", layers if workload.remat == "block" else 0),
        ("backward", layers),
    )
    for phase, count in runs:
        for name in ("dispatch", "combine"):
            yield _times(count, "all-to-all", ("ep",), phase, size, f"experts {name}")


def _stages(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Iterator[Collective]:
    """The stream from stage to stage and its gradient back; with virtual stages each passes all devices as often.

    Every device of tp hands on its share (arXiv:2104.04473, section 4.1).
    """
    stream = _tokens(workload, mesh) * workload.model.embed / mesh.tp
    size = stream * dtype_bytes(workload.compute_dtype)
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        yield _times(strategy.virtual_stages, "collective-permute", ("pp",), phase, size, "stream")


def _loss(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """The softmax over a split vocab: for each token its maximum, its sum and the target's logit, in float32."""
    yield _times(3, "all-reduce", ("tp",), "forward", _tokens(workload, mesh) * 4, "softmax")
    for axes in (RULES["sequence"], RULES["batch"]):
        yield _times(1, "all-reduce", axes, "forward", 4, "loss")


def _tokens(workload: Workload, mesh: MeshShape) -> int:
    """The tokens of one device."""
    return workload.tokens // mesh.degree(token_axes())


def _times(count: int, kind: Kind, axes: tuple[str, ...], phase: Phase, size: float, array: str) -> Collective:
    """A collective of `size` bytes that runs `count` times."""
    return Collective(kind=kind, axes=axes, phase=phase, bytes=int(size) * count, count=count, array=array)
