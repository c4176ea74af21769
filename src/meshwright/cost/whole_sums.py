"""Where a compiler sums an array whole though each device keeps a shard of the sum."""

from __future__ import annotations

from meshwright.hardware import System

_LEAST_CHIPS = 16
"""The chips of the smallest slice that it is so on: of v5e and v6e a square one, of v5p any."""


def is_summed_whole(system: System, degree: int) -> bool:
    """Whether a reduce-scatter over `degree` devices is an all-reduce and a slice, which moves twice the bytes.

    The TPU compiler (libtpu 0.0.42.1) does so where a sum is over every chip of a slice: on v5e and v6e of square ones
    from 4x4, on v5p from 2x2x4 on (`benchmarks/whole_slice_sums.py`). Other chips were not tried.
    """
    chips = system.num_chips // system.num_slices
    if degree != chips * system.devices_per_chip or chips < _LEAST_CHIPS:
        return False
    if system.chip.name in ("v5e", "v6e"):
        return system.shape[0] == system.shape[1]
    return system.chip.name == "v5p"
