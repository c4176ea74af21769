"""Fractions of peak rates that hardware achieves, each with its public source.

Only the two fractions for experts on TPUs are estimated from the step times of training runs.
"""

from __future__ import annotations

from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.efficiency import product_efficiency

HBM_SHARE = 0.88
"""Fraction of HBM bandwidth that elementwise ops reach.

Adding two arrays of 4,096 x 8,192 on an A100 moves 1,797 GB/s, of a peak of 2,039 GB/s (github.com/microsoft/vidur,
data/profiling, commit 7d47513, `add` of Llama-2-70B).
"""

TPU_GATHER_SHARE = 0.2
"""Fraction of HBM bandwidth at which a TPU reads or writes rows in the order of routing.

An estimate, so that predictions agree with the published step times of MoE models in MaxText on TPU7x
(`benchmarks/published_runs.py`).
"""

TPU_GROUPED_SHARE = 0.5
"""Flops rate of a TPU's grouped matmul (groups of any number of rows), as a fraction of a dense matmul's rate.

Estimated as `TPU_GATHER_SHARE` is.
"""

OVERLAP_SLOWDOWN = 0.189
"""Fraction by which a GPU's ops slow down while a collective uses multiprocessors and power (arXiv:2507.03114)."""

SPREAD = 0.08
"""Longest minus shortest time of an op over GPUs of a kind, divided by the median: clocks differ (arXiv:2208.11035)."""


def contention_seconds(hidden_seconds: float, system: System) -> float:
    """Return the seconds by which concurrent collectives slow a device's ops down.

    It is 0 on chips other than GPUs: on TPUs, DMA engines move the data. hidden_seconds: seconds of collectives that
    overlap with ops.
    """
    return OVERLAP_SLOWDOWN * hidden_seconds if system.chip.kind == "gpu" else 0.0


def straggling_seconds(seconds: float, num_devices: int, system: System) -> float:
    """Return the seconds by which the slowest device lengthens a step, if the median device computes for `seconds`.

    Device times are assumed uniform over a width of `SPREAD`: the slowest of n is expected (n - 1) / (n + 1) of the way
    from the middle to the end. 0 on TPUs, whose clocks are fixed.
    """
    spread = SPREAD if system.chip.kind == "gpu" else 0.0
    return seconds * spread / 2 * (num_devices - 1) / (num_devices + 1)


def product_seconds(
    rows: float, inner: float, columns: float, *, system: System, dtype: str, moved_bytes: float | None = None
) -> float:
    """Return the seconds of [rows, inner] @ [inner, columns] on one device, at the efficiency of that size.

    moved_bytes: bytes read from and written to memory; by default each operand and the result once.
    """
    ideal = 2 * rows * inner * columns / system.peak(dtype)
    sizes = max(1.0, rows), max(1.0, inner), columns
    return ideal / product_efficiency(system, *sizes, dtype=dtype, moved_bytes=moved_bytes)
