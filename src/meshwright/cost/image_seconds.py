"""The ops of an image model on one device: convolutions as products, and the passes over memory between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.cost.rates.achieved import HBM_SHARE
from meshwright.cost.rates.efficiency import product_efficiency
from meshwright.hardware import System, dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.step import IMAGE_RULES, ConvNet, Convolution, ImageWorkload, convolutions, pooled_size

Passes = tuple[int, int]
"""How often an op goes over a convolution's result in memory, forward and backward."""

FUSED: Mapping[str, Passes] = {"norm": (3, 5), "last": (4, 7), "shortcut": (1, 5)}
"""Passes of a batch norm with the relu and the sum that follow, compiled into few, by the convolution's place.

norm, forward: read for the statistics, read again, and written normed and cut off. Backward its input and the gradient
are read for the sums of the statistics' gradients, both again, and the gradient is written. last: the shortcut is read
too; backward the sum's result, in both passes, as no gradient goes where it was cut off. shortcut: its results are
normed as that sum reads them.
"""

UNFUSED: Mapping[str, Passes] = {"norm": (5, 8), "last": (8, 8), "shortcut": (3, 5)}
"""The same one by one: a relu reads and writes, backward it reads two and writes one, as a sum does forward."""

ADD = 3
"""A block's input has two gradients, its own and the shortcut's: both read, their sum written."""

PARTS = tuple(2**power for power in range(9))
"""Into how many parts a GPU library cuts the images whose products sum to the gradient of a small kernel."""


@dataclass(frozen=True, kw_only=True)
class ImageOp:
    """One op of a step on one device.

    seconds: at the efficiency of a product's sizes, or the achieved bandwidth of a pass over memory.
    """

    path: str
    phase: Literal["forward", "backward"]
    flops: float
    hbm_bytes: float
    seconds: float

    def bound(self, system: System, dtype: str) -> Literal["compute", "memory"]:
        """What its time would be at the peaks of arithmetic and of memory."""
        is_computing = self.flops / system.peak(dtype) >= self.hbm_bytes / system.hbm_bytes_per_second
        return "compute" if is_computing else "memory"


def image_ops(workload: ImageWorkload, mesh: MeshShape, system: System) -> tuple[ImageOp, ...]:
    """Every op of a step on one device, the update apart."""
    images = workload.batch / mesh.degree(IMAGE_RULES["batch"])
    return _ops(_Step(workload.model, images, system, workload.compute_dtype, workload.fuses))


@lru_cache(maxsize=256)
def _ops(step: _Step) -> tuple[ImageOp, ...]:
    """The ops of a step, whatever the mesh around it."""
    return tuple(op for made in convolutions(step.model) for op in step.ops(made)) + tuple(step.pools())


def convolution_seconds(
    m: float, k: float, n: float, *, moved_bytes: float, system: System, dtype: str, parts: tuple[int, ...] = (1,)
) -> float:
    """The time of a convolution done as the product [m, k] @ [k, n] (implicit GEMM, arXiv:1410.0759).

    A row of the left matrix is what a filter sees of an image, so that each pixel stands in it many times; memory moves
    it once. parts: what the contraction may be cut into, each part a product of its own whose float32 result is added.
    """

    def seconds(count: int) -> float:
        moved = moved_bytes + (8 * m * n * count if count > 1 else 0)
        share = product_efficiency(system, m * count, k / count, n, dtype=dtype, moved_bytes=moved)
        return 2 * m * k * n / (share * system.peak(dtype))

    return min(seconds(count) for count in parts if count <= k)


@dataclass(frozen=True)
class _Step:
    """The ops of a step for some images on one device."""

    model: ConvNet
    images: float
    system: System
    dtype: str
    fuses: bool

    def ops(self, made: Convolution) -> Iterator[ImageOp]:
        """A convolution with what follows it, forward, and backward both of its gradients."""
        yield from self._products(made)
        if not made.has_norm:
            return
        passes = FUSED if self.fuses else UNFUSED
        forward, backward = passes.get(made.place, passes["norm"])
        yield self._pass(f"{made.path}.norm", "forward", forward * made.out_elements)
        yield self._pass(f"{made.path}.norm", "backward", backward * made.out_elements)
        if made.place == "first":
            yield self._pass(f"{made.path}.sum", "backward", ADD * made.in_elements)

    def pools(self) -> Iterator[ImageOp]:
        """The maximum after the stem and the mean at the end: one side read and the other written."""
        first, *_, last, _ = convolutions(self.model)
        pooled = pooled_size(self.model) ** 2 * first.out_channels
        for name, elements in (("maximum", first.out_elements + pooled), ("mean", last.out_elements)):
            yield self._pass(name, "forward", elements)
            yield self._pass(name, "backward", elements)

    def _products(self, made: Convolution) -> Iterator[ImageOp]:
        """Y = X W, dX = dY W, dW = X dY; nothing wants the gradient of the images themselves."""
        each = dtype_bytes(self.dtype)
        # Of a 1x1 convolution with a stride only the pixels it looks at are read.
        seen = min(made.in_elements, made.out_size**2 * made.kernel**2 * made.in_channels)
        moved = each * (self.images * (seen + made.out_elements) + made.weight_elements)
        flops, rows = self.images * made.flops, self.images * made.out_size**2
        inner = made.kernel**2 * made.in_channels
        yield self._product(made.path, "forward", flops, moved, (rows, inner, made.out_channels))
        if made.place != "stem":
            pixels = self.images * made.in_size**2
            sizes = (pixels, flops / (2 * pixels * made.in_channels), made.in_channels)
            yield self._product(made.path, "backward", flops, moved, sizes)
        parts = PARTS if self.system.chip.kind == "gpu" else (1,)
        sizes = (inner, rows, made.out_channels)
        yield self._product(made.path, "backward", flops, moved, sizes, parts)

    def _product(
        self,
        path: str,
        phase: Literal["forward", "backward"],
        flops: float,
        moved_bytes: float,
        sizes: tuple[float, float, float],
        parts: tuple[int, ...] = (1,),
    ) -> ImageOp:
        """One product of a convolution."""
        # Dims under one row, of a 1x1 filter that skips pixels, are padded to it.
        m, k, n = (max(1.0, size) for size in sizes)
        seconds = convolution_seconds(
            m, k, n, moved_bytes=moved_bytes, system=self.system, dtype=self.dtype, parts=parts
        )
        return ImageOp(path=path, phase=phase, flops=flops, hbm_bytes=moved_bytes, seconds=seconds)

    def _pass(self, path: str, phase: Literal["forward", "backward"], elements: float) -> ImageOp:
        """A pass over so many elements of each image in memory."""
        moved = self.images * elements * dtype_bytes(self.dtype)
        seconds = moved / (HBM_SHARE * self.system.hbm_bytes_per_second)
        return ImageOp(path=path, phase=phase, flops=0.0, hbm_bytes=moved, seconds=seconds)
