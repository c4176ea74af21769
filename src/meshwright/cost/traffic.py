"""Every collective of a train step: what it moves, over which mesh axes, in which phase, how often.

Weights are gathered over the axes that store them and their gradients reduce-scattered back (ZeRO-3, arXiv:1910.02054);
activations are gathered before and reduce-scattered after each pair of products that tp splits (arXiv:2205.05198); a
split sequence gathers keys and values; a split vocab reduces the softmax of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Collective, Kind, Phase
from meshwright.workload import (
    IN_USE,
    RULES,
    Parameter,
    Workload,
    leaves,
    local_parameter_shape,
    parameters,
    spec,
    token_axes,
)


def step_collectives(workload: Workload, mesh: MeshShape) -> tuple[Collective, ...]:
    """Every collective of a step with more than one device in its group, in bytes per device and step."""
    moves = [
        *(
            move
            for path, parameter in leaves(parameters(workload.model))
            for move in _weight(path, parameter, workload, mesh)
        ),
        *_stream(workload, mesh),
        *_keys_and_values(workload, mesh),
        *_loss(workload, mesh),
    ]
    return tuple(found for move in moves if (found := _live(move, mesh)))


def _live(move: Collective, mesh: MeshShape) -> Collective | None:
    """The collective over its axes of more than one device; None where there are none, or where it never runs."""
    axes = tuple(axis for axis in move.axes if mesh.degrees[axis] > 1)
    return replace(move, axes=axes) if axes and move.count else None


def _weight(path: str, parameter: Parameter, workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """What the use of one parameter moves."""
    count = workload.model.num_layers if path.startswith("layers.") else 1
    shard = math.prod(local_parameter_shape(parameter, mesh=mesh, what=path)) // count
    if "norm" in parameter.axes:
        # Kept whole: its gradient, in float32, is summed over every axis that splits the stream.
        for axes in (RULES["residual_sequence"], RULES["batch"]):
            yield _times(count, "all-reduce", axes, "backward", 4 * shard, path)
        return
    size = dtype_bytes(workload.compute_dtype)
    stored = tuple(axis for name in parameter.axes if name in IN_USE for axis in RULES[name])
    gathered = size * shard * mesh.degree(stored)
    yield _times(count, "all-gather", stored, "forward", gathered, path)
    if path.startswith("layers."):
        yield _times(count, "all-gather", stored, "recompute", gathered, path)
    yield _times(count, "reduce-scatter", stored, "backward", gathered, path)
    copies = tuple(axis for axis in token_axes() if axis not in stored)
    yield _times(count, "all-reduce", copies, "backward", size * shard, path)
    for dim in spec(parameter.axes, mesh=mesh, what=path):
        yield _times(1, "all-reduce", dim, "update", 4, f"norm of the gradient of {path}")


def _stream(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """The residual stream: gathered over tp before the products of a block, reduce-scattered after, and back again."""
    layers, remat = workload.model.num_layers, workload.remat
    size = _tokens(workload, mesh) * workload.model.embed * dtype_bytes(workload.compute_dtype)
    yield _times(1, "reduce-scatter", ("tp",), "forward", size, "embedding")
    yield _times(1, "all-gather", ("tp",), "backward", size, "embedding")
    for name in ("attention", "mlp"):
        yield _times(layers, "all-gather", ("tp",), "forward", size, f"{name} input")
        yield _times(layers, "reduce-scatter", ("tp",), "forward", size, f"{name} output")
        yield _times(layers if remat != "none" else 0, "all-gather", ("tp",), "recompute", size, f"{name} input")
        yield _times(layers, "all-gather", ("tp",), "backward", size, f"{name} output gradient")
        yield _times(layers, "reduce-scatter", ("tp",), "backward", size, f"{name} input gradient")
    # The mlp's input follows from attention's output; what follows from the mlp's is the next block's own input.
    yield _times(layers if remat == "block" else 0, "reduce-scatter", ("tp",), "recompute", size, "attention output")
    yield _times(1, "all-gather", ("tp",), "forward", size, "logits input")
    yield _times(1, "reduce-scatter", ("tp",), "backward", size, "logits input gradient")


def _keys_and_values(workload: Workload, mesh: MeshShape) -> Iterator[Collective]:
    """Keys and values, gathered where the sequence is split: every query sees all of them."""
    model = workload.model
    whole = workload.tokens // mesh.degree(("dp", "fsdp")) * model.num_kv_heads // mesh.tp * model.head_dim
    size = whole * dtype_bytes(workload.compute_dtype)
    again = model.num_layers if workload.remat != "none" else 0
    for name in ("keys", "values"):
        yield _times(model.num_layers, "all-gather", ("sp",), "forward", size, name)
        yield _times(again, "all-gather", ("sp",), "recompute", size, name)
        yield _times(model.num_layers, "reduce-scatter", ("sp",), "backward", size, f"{name} gradient")


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
