"""Roofline time of an op on one device, and the batch from which a matmul is compute bound.

After the scaling book (jax-ml.github.io/scaling-book), roofline and training chapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System


@dataclass(frozen=True)
class OpTime:
    """Time of an op's flops and time of its memory traffic; both overlap, so the longer one is the op's time."""

    flops_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The op's time: the longer of compute and memory traffic."""
        return max(self.flops_seconds, self.memory_seconds)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """The resource that determines the op's time."""
        return "compute" if self.flops_seconds >= self.memory_seconds else "memory"


def op_seconds(flops: float, hbm_bytes: float, system: System, *, dtype: str = "bf16") -> OpTime:
    """Return the roofline time on one device of `flops` operations that read and write `hbm_bytes` of memory.

    T_math = flops / C and T_mem = bytes / W, at peak rates C and W (scaling book, roofline). Raises if the chip has no
    peak for the dtype.
    """
    return OpTime(flops / system.peak(dtype), hbm_bytes / system.hbm_bytes_per_second)


def intensity(flops: float, nbytes: float) -> float:
    """Return flops per byte, of memory traffic or of a collective; infinite for 0 bytes."""
    return flops / nbytes if nbytes else math.inf


def hardware_intensity(system: System, *, dtype: str = "bf16") -> float:
    """Return the flops per byte of memory traffic from which an op is compute bound: C / W_hbm."""
    return intensity(system.peak(dtype), system.hbm_bytes_per_second)


def network_intensity(system: System, bytes_per_second: float, *, dtype: str = "bf16") -> float:
    """Return the flops per communicated byte above which an op is compute bound: alpha = C / W.

    For an axis's `collective.gather_bytes_per_second`, it is also the number of tokens per device above which data
    parallelism and FSDP over that axis hide their communication (scaling book, training).
    """
    return intensity(system.peak(dtype), bytes_per_second)


def matmul_bytes(
    rows: float, inner: float, columns: float, *, weight_dtype: str = "bf16", activation_dtype: str = "bf16"
) -> float:
    """Return the bytes of memory traffic of [rows, inner] @ [inner, columns]: input, weight and result once each."""
    activations = (rows * inner + rows * columns) * dtype_bytes(activation_dtype)
    return activations + inner * columns * dtype_bytes(weight_dtype)


def critical_batch(
    system: System,
    *,
    weight_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    compute_dtype: str | None = None,
    dims: tuple[int, int] | None = None,
) -> float:
    """Return the number of rows from which a matmul with a weight [D, F] is compute bound instead of memory bound.

    From 2 B D F / C = (s_w D F + s_a B (D + F)) / W: B = s_w / (2 W / C - s_a (1 / D + 1 / F)), infinite if the
    activations alone exceed the memory bandwidth. s_w and s_a are bytes per element of weight and activations.

    dims: (D, F); if None they are taken as large: s_w C / (2 W) (scaling book, roofline, problems 1 to 3).
    compute_dtype: dtype of the arithmetic; by default that of the activations.
    """
    bytes_per_flop = system.hbm_bytes_per_second / system.peak(compute_dtype or activation_dtype)
    room = 2 * bytes_per_flop
    if dims is not None:
        room -= dtype_bytes(activation_dtype) * sum(1 / dim for dim in dims)
    return dtype_bytes(weight_dtype) / room if room > 0 else math.inf
