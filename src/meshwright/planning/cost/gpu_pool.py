"""The part of a GPU's memory that JAX reserves, and what to set where a program needs more."""

from __future__ import annotations

import math

from meshwright.description.hardware.system import System
from meshwright.units import show_bytes

JAX_POOL = 0.75
"""Fraction of a GPU's memory that JAX reserves by default.

XLA_PYTHON_CLIENT_MEM_FRACTION changes it (docs.jax.dev/en/latest/gpu_memory_allocation.html).
"""


def pool_notes(system: System, peak: float) -> tuple[str, ...]:
    """Return a note with the setting to use if a plan needs more GPU memory than JAX reserves by default; else ().

    peak: bytes on one device.
    """
    physical = system.chip.physical_bytes
    pool, wanted = JAX_POOL * physical, peak * (1 + (system.memory_headroom or 0.0))
    if system.chip.kind != "gpu" or not pool < wanted <= system.usable_bytes:
        return ()
    # In steps of 5%, at most what the CUDA context leaves free.
    fraction = min(math.ceil(20 * wanted / physical) / 20, math.floor(100 * system.chip.usable_bytes / physical) / 100)
    return (
        f"JAX takes {JAX_POOL:.0%} of a GPU's memory by default, {show_bytes(pool)}: set"
        f" XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f} for this plan",
    )
