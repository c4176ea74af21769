"""Costs of a step of an image model: flops, collectives, memory, and the time of its ops and of its update."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System
from meshwright.description.step.images import IMAGE_RULES, STATISTICS, ImageWorkload, image_parameters, image_step
from meshwright.description.step.ir import Communicate, Elementwise, Matmul, Width
from meshwright.description.step.parameter_tree import leaves
from meshwright.description.step.rules import local_parameter_shape
from meshwright.description.step.strategy import DEFAULT, FrameworkProfile
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import moved_bytes
from meshwright.planning.cost.elementwise import SGD_PASSES
from meshwright.planning.cost.flops import StepFlops, matmul_flops, product_flops
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.roofline import OpTime, op_seconds
from meshwright.planning.cost.seconds import OpTimer
from meshwright.record import Collective

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that one all-reduce sends during backward: PyTorch DistributedDataParallel's default bucket."""

IMAGE_AXES = IMAGE_RULES["batch"]
"""The mesh axes that split images."""


class ImageOp(NamedTuple):
    """An op, its seconds on one device, and its roofline time (at peak flops and at peak memory bandwidth)."""

    op: Matmul | Elementwise
    seconds: float
    ideal: OpTime


def image_flops(workload: ImageWorkload) -> float:
    """Return the flops of a step over all devices: three matmuls per convolution, two for the stem.

    Pooling, norms and sums are not counted: they are less than a percent.
    """
    return image_step_flops(workload, MeshShape()).total


def image_step_flops(workload: ImageWorkload, mesh: MeshShape) -> StepFlops:
    """Return the flops that one device executes in a step: an equal share of the step's flops."""
    return product_flops(image_step(workload, mesh))


def image_collectives(workload: ImageWorkload, mesh: MeshShape) -> tuple[Collective, ...]:
    """Return every collective of a step with more than one device in its group, in bytes per device and step.

    Convolution kernels sharded over fsdp are gathered block by block, once for forward and once for backward, and their
    gradients are reduce-scattered (ZeRO-3, arXiv:1910.02054). All-reduced gradients are sent in buckets; a bucket has
    gradients over the same axes.
    """
    step, narrow = image_step(workload, mesh), dtype_bytes(workload.compute_dtype)
    widths: dict[Width, float] = {"compute": narrow, "gradient": narrow, "float32": 4}
    groups: dict[tuple[object, ...], list[Communicate]] = {}
    for op in step.communication:
        groups.setdefault((op.kind, op.axes, op.phase, op.of_weight), []).append(op)
    found: list[Collective] = []
    for ops in groups.values():
        first, size = ops[0], sum(moved_bytes(op, step.extents, widths) for op in ops)
        if not first.of_weight:
            count, name = len(ops), STATISTICS
        elif first.kind == "all-reduce":
            has_kernels = any(op.array.width == "gradient" for op in ops)
            count, name = math.ceil(size / BUCKET_BYTES), "gradients" if has_kernels else "gradients of vectors"
        else:
            count, name = len({op.region for op in ops}), "kernels" if first.kind == "all-gather" else "gradients"
        found.append(
            Collective(kind=first.kind, axes=first.axes, phase=first.phase, bytes=int(size), count=count, array=name)
        )
    return tuple(found)


def image_memory(workload: ImageWorkload, mesh: MeshShape) -> dict[str, int]:
    """Return the bytes per device at the start of backward, by term, and their sum, `peak`.

    `activations` are those that backward reads, and the logits, over which their gradient is written. `gradients`
    are counted for all parameters.
    """
    step, narrow = image_step(workload, mesh), dtype_bytes(workload.compute_dtype)
    local, local_dims = step.extents.local, step.extents.local_dims
    stored = _stored_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    read = {op.image.name: op.image for op in step.ops.matmuls if op.image and op.role == "weight_gradient"}
    read |= {array.name: array for op in step.ops.elementwise if op.phase == "backward" for array in op.arrays}
    images = read.pop("images")
    products = [op for op in step.ops.matmuls if op.phase == "forward"]
    kept = sum(map(local, read.values())) + local_dims((*products[-1].rows, *products[-1].columns))
    gathered = (local(op.array) for op in step.communication if op.kind == "all-gather")
    terms = {
        "parameters": stored,
        "optimizer": stored,
        "gradients": stored,
        "batch": narrow * local(images) + 4 * local_dims(images.dims[:1]),
        "activations": narrow * kept,
        # The gradients of a convolution's result and of its input.
        "working": narrow * max(local(op.image) + local_dims((*op.rows, *op.columns)) for op in products if op.image),
        "gathered": narrow * max(gathered, default=0),
    }
    sizes = {name: int(size) for name, size in terms.items()}
    return sizes | {"peak": sum(sizes.values())}


@lru_cache(maxsize=256)
def image_ops(workload: ImageWorkload, mesh: MeshShape, system: System) -> tuple[ImageOp, ...]:
    """Return every matmul and elementwise op of a step, except the update, with its time on one device."""
    step, dtype = image_step(workload, mesh), workload.compute_dtype
    strategy = replace(DEFAULT, profile=FrameworkProfile(fused_elementwise=workload.fuses))
    timer = OpTimer(step, step.extents, dtype, system, strategy)
    found: list[ImageOp] = []
    for op in step.ops.matmuls:
        assert op.image
        moved = timer.convolution_bytes(op, op.image)
        ideal = op_seconds(matmul_flops(op, step.extents), moved, system, dtype=dtype)
        found.append(ImageOp(op, timer.seconds(op), ideal))
    for op in step.ops.elementwise:
        seconds = timer.seconds(op)
        found.append(ImageOp(op, seconds, OpTime(0.0, HBM_SHARE * seconds)))
    return tuple(found)


def image_update_seconds(workload: ImageWorkload, mesh: MeshShape, system: System) -> float:
    """Return the seconds of SGD's pass over a device's gradients, parameters and momentum."""
    states = _stored_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    return SGD_PASSES * states / (HBM_SHARE * system.hbm_bytes_per_second)


def _stored_elements(workload: ImageWorkload, mesh: MeshShape) -> int:
    """Return the number of elements of the parameters that one device stores."""
    return sum(
        math.prod(local_parameter_shape(parameter, mesh=mesh, rules=IMAGE_RULES, what=path))
        for path, parameter in leaves(image_parameters(workload.model))
    )
