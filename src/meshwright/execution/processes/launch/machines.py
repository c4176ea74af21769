"""The machines that a cluster assigns to a system, one process on each."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError

SMALL_SLICE_CHIPS, MACHINE_CHIPS = 8, 4
"""A TPU v5e or v6e slice of up to 8 chips is one machine; in larger slices each machine has 4 chips.

cloud.google.com/tpu/docs/v5e and /v6e, tables of configurations.
"""


@dataclass(frozen=True)
class Machines:
    """The machines of a system, all of one kind."""

    system: System
    per_slice: int  # Machines in a slice.
    chips: int  # Chips (or GPUs) of a machine.

    @property
    def count(self) -> int:
        """The number of machines in all slices."""
        return self.per_slice * self.system.num_slices

    @property
    def topology(self) -> str:
        """The shape of a slice in chips, such as `4x4x4`."""
        return "x".join(map(str, self.system.shape))


def machines_of(system: System) -> Machines:
    """Return the machines of a system.

    Raises:
        MeshwrightError: the system is simulated, or does not use all chips of its last machine.
    """
    chip, chips = system.chip, system.num_chips // system.num_slices
    if chip.kind == "cpu":
        raise MeshwrightError(f"{system} is simulated on one machine: meshwright launch -n N -- train … runs it here")
    each = min(chips, chip.chips_per_host)
    if chip.name in ("v5e", "v6e") and chips > SMALL_SLICE_CHIPS:
        each = MACHINE_CHIPS
    if chips % each:
        raise MeshwrightError(
            f"{system} is not a whole number of machines of {each}; take {chips // each * each} or"
            f" {(chips // each + 1) * each}"
        )
    return Machines(system, chips // each, each)
