"""What a step of an image model takes of one device: flops, collectives, memory, and the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost.flops import StepFlops
from meshwright.cost.rates.achieved import HBM_SHARE
from meshwright.hardware import System, dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.record import Collective, Kind, Phase
from meshwright.step import (
    IMAGE_RULES,
    ImageWorkload,
    convolutions,
    image_parameters,
    leaves,
    local_parameter_shape,
    num_image_parameters,
    pooled_size,
)

BUCKET_BYTES = 25 * 2**20
"""The gradients that are summed at once, as they come out of backward: PyTorch DistributedDataParallel's default."""

IMAGE_AXES = IMAGE_RULES["batch"]
"""The mesh axes that split images."""


def image_flops(workload: ImageWorkload) -> float:
    """The flops that a step needs over all devices: three products a convolution, of the stem two.

    Nothing wants the gradient of the images. The mean, norms and sums are not counted: under a percent.
    """
    forward = sum(made.flops for made in convolutions(workload.model))
    return workload.batch * (3 * forward - convolutions(workload.model)[0].flops)


def image_step_flops(workload: ImageWorkload, mesh: MeshShape) -> StepFlops:
    """The flops that one device executes in a step: its share, as nothing is computed twice."""
    images = workload.batch / mesh.degree(IMAGE_AXES)
    forward = images * sum(made.flops for made in convolutions(workload.model))
    total = image_flops(workload) / mesh.degree(IMAGE_AXES)
    return StepFlops(forward=forward, recompute=0.0, backward=total - forward)


def image_collectives(workload: ImageWorkload, mesh: MeshShape) -> tuple[Collective, ...]:
    """Every collective of a step with more than one device in its group, in bytes per device and step.

    Kernels stored over fsdp are gathered block by block, once for each pass, and their gradients reduce-scattered
    (ZeRO-3, arXiv:1910.02054); gradients are summed over dp, and those of vectors in float32 over both, in buckets.
    """
    whole, shard, vectors = _elements(workload, mesh)
    narrow, units = dtype_bytes(workload.compute_dtype), workload.model.num_blocks + 2
    # Where both are summed over the same axes, buckets take both.
    summed, apart = (narrow * shard + 4 * vectors, 0) if mesh.fsdp == 1 else (narrow * shard, 4 * vectors)
    moves = [
        _move("all-gather", ("fsdp",), "forward", narrow * whole, units, "kernels"),
        _move("all-gather", ("fsdp",), "backward", narrow * whole, units, "kernels"),
        _move("reduce-scatter", ("fsdp",), "backward", narrow * whole, units, "gradients"),
        _move("all-reduce", ("dp",), "backward", summed, _buckets(summed), "gradients"),
        _move("all-reduce", IMAGE_AXES, "backward", apart, _buckets(apart), "gradients of vectors"),
        *(_statistics(workload) if workload.syncs_norms else ()),
    ]
    return tuple(found for move in moves if (found := _live(move, mesh)))


def image_memory(workload: ImageWorkload, mesh: MeshShape) -> dict[str, int]:
    """Bytes per device by name when backward begins, and their sum, `peak`; all gradients are counted there already.

    Of each convolution its result and, where a relu follows, what that makes of it are kept.
    """
    _, shard, vectors = _elements(workload, mesh)
    stored, narrow = (shard + vectors) * dtype_bytes(workload.param_dtype), dtype_bytes(workload.compute_dtype)
    images, made = workload.batch / mesh.degree(IMAGE_AXES), convolutions(workload.model)
    kept = sum(c.out_elements * (1 if c.place in ("shortcut", "classes") else 2) for c in made)
    kept += pooled_size(workload.model) ** 2 * workload.model.width
    terms = {
        "parameters": stored,
        "optimizer": stored,
        "gradients": stored,
        "batch": images * (narrow * 3 * workload.model.image_size**2 + 4),
        "activations": images * narrow * kept,
        # The gradients of a convolution's result and of its input.
        "working": images * narrow * max(c.in_elements + c.out_elements for c in made),
        "gathered": narrow * max(c.weight_elements for c in made) if mesh.fsdp > 1 else 0,
    }
    sizes = {name: int(size) for name, size in terms.items()}
    return sizes | {"peak": sum(sizes.values())}


def image_update_seconds(workload: ImageWorkload, mesh: MeshShape, system: System) -> float:
    """SGD's pass: it reads gradient, parameter and momentum and writes the last two."""
    _, shard, vectors = _elements(workload, mesh)
    states = (shard + vectors) * dtype_bytes(workload.param_dtype)
    return 5 * states / (HBM_SHARE * system.hbm_bytes_per_second)


def _elements(workload: ImageWorkload, mesh: MeshShape) -> tuple[int, int, int]:
    """The elements of all kernels, of those that one device stores, and of the vectors."""
    shard = vectors = 0
    for path, parameter in leaves(image_parameters(workload.model)):
        size = math.prod(local_parameter_shape(parameter, mesh=mesh, rules=IMAGE_RULES, what=path))
        if parameter.role == "vector":
            vectors += size
        else:
            shard += size
    return num_image_parameters(workload.model) - vectors, shard, vectors


def _statistics(workload: ImageWorkload) -> Iterator[Collective]:
    """A sum and a sum of squares of each channel forward, and as many of gradients backward, for every batch norm."""
    norms = [made.out_channels for made in convolutions(workload.model) if made.has_norm]
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        yield _move("all-reduce", IMAGE_AXES, phase, 2 * 4 * sum(norms), len(norms), STATISTICS)


STATISTICS = "statistics of batch norms"
"""What the collectives between two ops are called: the second waits for them."""


def _move(kind: Kind, axes: tuple[str, ...], phase: Phase, size: float, count: int, array: str) -> Collective:
    """A collective of `size` bytes in all that runs `count` times."""
    return Collective(kind=kind, axes=axes, phase=phase, bytes=int(size), count=count, array=array)


def _live(move: Collective, mesh: MeshShape) -> Collective | None:
    """The collective over its axes of more than one device; None where there are none, or where it never runs."""
    axes = tuple(axis for axis in move.axes if mesh.degrees[axis] > 1)
    return replace(move, axes=axes) if axes and move.count else None


def _buckets(nbytes: float) -> int:
    """The buckets that so many bytes of gradients fill."""
    return math.ceil(nbytes / BUCKET_BYTES)
