"""Fractions of peak rates that hardware achieves, each with its public source; none is fitted to training runs."""

from __future__ import annotations

from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.efficiency import product_efficiency

HBM_SHARE = 0.88
"""Fraction of HBM bandwidth: adding two arrays of 4,096 x 8,192 on an A100 moves 1,797 of 2,039 GB/s.

github.com/microsoft/vidur, data/profiling (commit 7d47513), `add` of Llama-2-70B.
"""

TPU_GATHER_SHARE = 0.2
"""Fraction of HBM bandwidth at which a TPU reads or writes rows in the order of routing.

Estimate from published steps of MoE models in MaxText on TPU7x, which nothing else explains
(`benchmarks/published_runs.py`).
"""

TPU_GROUPED_SHARE = 0.5
"""Rate of grouped matmuls on a TPU, whose groups have any number of rows, relative to a dense one; source: the same."""

OVERLAP_SLOWDOWN = 0.189
"""Slowdown of a GPU's ops while a collective runs and takes multiprocessors and power (arXiv:2507.03114)."""

SPREAD = 0.08
"""Spread of an op's time over GPUs of one kind, whose power limits allow different clocks (arXiv:2208.11035)."""


def contention_seconds(hidden_seconds: float, system: System) -> float:
    """Return the seconds by which concurrent collectives slow ops down; 0 on TPUs, where DMA engines move the data."""
    return OVERLAP_SLOWDOWN * hidden_seconds if system.chip.kind == "gpu" else 0.0


def straggling_seconds(seconds: float, num_devices: int, system: System) -> float:
    """Return the seconds that a step loses to its slowest device, if the median device computes for `seconds`.

    Device times are assumed uniform over a width of `SPREAD`: the slowest of n is (n - 1) / (n + 1) of the way from the
    middle to the end. TPUs lose none: their clocks are fixed.
    """
    spread = SPREAD if system.chip.kind == "gpu" else 0.0
    return seconds * spread / 2 * (num_devices - 1) / (num_devices + 1)


def product_seconds(
    rows: float, inner: float, columns: float, *, system: System, dtype: str, moved_bytes: float | None = None
) -> float:
    """Return the seconds of [rows, inner] @ [inner, columns] on one device, at the efficiency of that size.

    moved_bytes: traffic to and from memory; by default each operand and the result once.
    """
    ideal = 2 * rows * inner * columns / system.peak(dtype)
    sizes = max(1.0, rows), max(1.0, inner), columns
    return ideal / product_efficiency(system, *sizes, dtype=dtype, moved_bytes=moved_bytes)
