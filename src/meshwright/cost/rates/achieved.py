"""What hardware achieves of its peaks, each figure with its public source: nothing here is fitted on whole runs."""

from __future__ import annotations

from meshwright.cost.rates.efficiency import product_efficiency
from meshwright.hardware import System

HBM_SHARE = 0.88
"""Of the bandwidth of memory: a sum of two arrays of 4,096 x 8,192 on an A100 moves 1,797 of 2,039 GB/s.

github.com/microsoft/vidur, data/profiling (commit 7d47513), `add` of Llama-2-70B.
"""

OVERLAP_SLOWDOWN = 0.189
"""What ops on a GPU lose while a collective runs beside them: it takes multiprocessors and power (arXiv:2507.03114)."""

SPREAD = 0.08
"""The spread of the times of one op on GPUs of one kind (arXiv:2208.11035): each runs at the clock its power allows."""


def contention_seconds(hidden_seconds: float, system: System) -> float:
    """What ops lose to collectives that run beside them for so long; on a TPU engines of their own move the data."""
    return OVERLAP_SLOWDOWN * hidden_seconds if system.chip.kind == "gpu" else 0.0


def straggling_seconds(seconds: float, num_devices: int, system: System) -> float:
    """What a step loses to the slowest of its devices, where the median one computes for so long.

    Devices are taken as spread evenly over `SPREAD` of their time: the slowest of n stands (n - 1) / (n + 1) of the way
    from its middle to its end. The clocks of TPUs are fixed.
    """
    spread = SPREAD if system.chip.kind == "gpu" else 0.0
    return seconds * spread / 2 * (num_devices - 1) / (num_devices + 1)


def product_seconds(
    rows: float, inner: float, columns: float, *, system: System, dtype: str, moved_bytes: float | None = None
) -> float:
    """The time of [rows, inner] @ [inner, columns] on one device, at the efficiency of that size.

    moved_bytes: to and from memory, where that is not each operand and the result once.
    """
    ideal = 2 * rows * inner * columns / system.peak(dtype)
    sizes = max(1.0, rows), max(1.0, inner), columns
    return ideal / product_efficiency(system, *sizes, dtype=dtype, moved_bytes=moved_bytes)
