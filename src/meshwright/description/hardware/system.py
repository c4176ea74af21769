"""Hardware systems: a chip and the number of chips, such as `v5p:4x4x4`, `2*v5e:16x16`, `h100:64` or `cpu:8`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from meshwright.description.hardware.chip import Chip
from meshwright.description.hardware.load import load_chip, load_hardware, normal_name
from meshwright.description.hardware.slices import check_slice, slice_of, wraps
from meshwright.errors import MeshwrightError

_CLOUD_FORM = re.compile(r"(?:([0-9]{1,18})\s*\*)?\s*([^:*]+?)\s*-\s*([0-9]{1,18})", re.IGNORECASE)
_FORM = re.compile(r"(?:([0-9]{1,18})\s*\*)?\s*([^:*]+?)\s*:\s*([0-9]{1,18}(?:\s*x\s*[0-9]{1,18})*)", re.IGNORECASE)


@dataclass(frozen=True)
class System:
    """The hardware of a plan: slices of one shape, or a number of GPUs or simulated devices.

    Figures are per JAX device, in decimal units.

    Attributes:
        shape: chips along each physical axis of a slice; on a network of switches, the number of devices.
        memory_headroom: fraction by which a predicted memory peak is increased before it is compared with usable
            memory; None: not increased.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1
    memory_headroom: float | None = None

    def __hash__(self) -> int:
        """Hash only the fields that differ most: caches of the search hash systems very often."""
        return hash((self.chip.name, self.shape, self.num_slices))

    def __post_init__(self) -> None:
        if self.memory_headroom is not None and not 0 <= self.memory_headroom < 1:
            raise MeshwrightError(f"memory_headroom is {self.memory_headroom}; it is a share from 0 to below 1, as 0.1")

    @classmethod
    def parse(cls, text: str) -> System:
        """Return the system that a text such as `v5p:4x4x4` describes; see `parse_system`."""
        return parse_system(text)

    def resized(self, num_chips: int) -> System:
        """Return this system with `num_chips` chips in all.

        Several slices keep their shape if slices of that shape add up to `num_chips`; else their shape changes. Raises
        if equal slices cannot add up to `num_chips`.
        """
        slice_chips = math.prod(self.shape)
        if self.num_slices > 1 and num_chips > 0 and num_chips % slice_chips == 0:
            return replace(self, num_slices=num_chips // slice_chips)
        num_slices = self.num_slices if num_chips > slice_chips else 1
        per_slice, rest = divmod(num_chips, num_slices)
        if rest:
            raise MeshwrightError(f"{num_chips} chips are not {num_slices} slices of one shape")
        system = make_system(self.chip, (per_slice,), num_slices=num_slices)
        return replace(system, memory_headroom=self.memory_headroom)

    @property
    def num_chips(self) -> int:
        """Number of chips in all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def devices_per_chip(self) -> int:
        """Number of JAX devices per chip."""
        return self.chip.devices_per_chip

    @property
    def num_devices(self) -> int:
        """Number of devices in all slices."""
        return self.num_chips * self.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices. No host has chips of two slices."""
        return math.ceil(math.prod(self.shape) / self.chip.chips_per_host) * self.num_slices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each physical axis of a slice closes into a ring; empty on a network of switches."""
        return wraps(self.chip.torus, self.shape) if self.chip.torus else ()

    @cached_property
    def _sharers(self) -> int:
        """Number of devices that share a chip's flops and memory: its cores, or all simulated devices."""
        return self.num_devices if self.chip.is_shared else self.devices_per_chip

    def peak(self, dtype: str = "bf16") -> float:
        """Return the peak flops per second of a device's matmuls in a dtype. Raises if the chip has none for it."""
        return self.chip.peak(dtype) / self._sharers

    @property
    def hbm_bytes(self) -> float:
        """Advertised memory of a device, for estimates."""
        return self.chip.hbm_bytes / self._sharers

    @property
    def usable_bytes(self) -> float:
        """Memory that a program can use on a device: physical bytes less the runtime's own."""
        return self.chip.usable_bytes / self._sharers

    @property
    def plannable_bytes(self) -> float:
        """The largest predicted peak that still fits: usable memory divided by 1 + headroom."""
        return self.usable_bytes / (1 + (self.memory_headroom or 0.0))

    @property
    def hbm_bytes_per_second(self) -> float:
        """Memory bandwidth of a device."""
        return self.chip.hbm_bytes_per_second / self._sharers

    @property
    def host_bytes_per_second(self) -> float:
        """Bandwidth between a device and its host, one way."""
        return self.chip.host_bytes_per_second / self._sharers

    def __str__(self) -> str:
        """Return the text that `parse_system` reads."""
        slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices}{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_system(text: str, *, hardware_file: str | Path | None = None) -> System:
    """Parse a chip with a slice shape or a number of chips (of devices for GPUs and `cpu`).

    `v5p:4x4x4` is a slice of that shape, `v5e:16` the slice with 16 chips, 4x4, and `2*v5e:16x16` two slices connected
    by the data-centre network. In Google Cloud's names, `v6e-256` is 256 chips, and `v5p-512` is 512 TensorCores in 256
    chips. With `hardware_file` the chip is read from that TOML file. Raises if the chip is not known, or has no slices
    of the shape.

    >>> str(parse_system("tpu_v5e:16"))
    'v5e:4x4'
    """
    if (found := _parse_cloud(text)) is not None:
        return found
    match = _FORM.fullmatch(text.strip())
    if match is None:
        if (cloud := _CLOUD_FORM.fullmatch(text.strip())) and hardware_file is None:
            load_chip(cloud[2])  # Raises for a chip that is not known.
        slices = re.fullmatch(r"(\d+)\s*x\s*(\D.*)", text.strip())
        hint = f"; several slices are {slices[1]}*{slices[2]}" if slices else ""
        raise MeshwrightError(
            f"hardware {text!r} is not a chip and a shape or count, as v5p:4x4x4, h100:64, cpu:8 or v5p-128{hint}"
        )
    if slices := re.fullmatch(r"(\d+)\s*x\s*([a-z].*)", match[2], re.IGNORECASE):
        raise MeshwrightError(f"hardware {text!r}: several slices are {slices[1]}*{slices[2]}:{match[3]}")
    name = match[2]
    if hardware_file is None:
        chip = load_chip(name)
    else:
        chip = load_hardware(hardware_file)
        if normal_name(name) != chip.name:
            raise MeshwrightError(
                f"{Path(hardware_file).name} describes {chip.name}, and {name!r} is asked for; take --on {chip.name}:…"
            )
    num_slices, shape = int(match[1] or 1), tuple(int(size) for size in re.split(r"\s*x\s*", match[3].lower()))
    if num_slices < 1 or min(shape) < 1:
        raise MeshwrightError(f"hardware {text!r} has a size 0; sizes are whole numbers from 1")
    return make_system(chip, shape, num_slices=num_slices)


def cloud_note(text: str) -> str | None:
    """Return a note on a Google Cloud name that counts TensorCores and not chips; None for other texts."""
    system = _parse_cloud(text)
    if system is None or system.chip.cloud_cores == 1:
        return None
    cores = system.num_chips * system.chip.cloud_cores
    return f"{text.strip()} is {cores:,} TensorCores in {system.num_chips:,} chips: {system}"


def _parse_cloud(text: str) -> System | None:
    """Return the system of a Google Cloud name, such as `v5p-512`; None for other texts."""
    match = _CLOUD_FORM.fullmatch(text.strip())
    if match is None:
        return None
    try:
        chip = load_chip(match[2])
    except MeshwrightError:
        return None
    if chip.torus is None:
        return None
    cores = int(match[3])
    if cores % chip.cloud_cores:
        raise MeshwrightError(
            f"hardware {text!r}: Cloud's names of {chip.name} count TensorCores, {chip.cloud_cores} a chip; {cores} of"
            f" them are no whole chips"
        )
    if not cores:
        raise MeshwrightError(f"hardware {text!r} has a size 0; sizes are whole numbers from 1")
    return make_system(chip, (cores // chip.cloud_cores,), num_slices=int(match[1] or 1))


MOST_DEVICES = 1_000_000
"""Largest number of devices of a system: a search over more would take too long."""


def make_system(chip: Chip, shape: tuple[int, ...], *, num_slices: int = 1) -> System:
    """Return a system of a chip and a slice shape, or a number of chips. Raises if that is illegal."""
    if (count := math.prod(shape) * num_slices * chip.devices_per_chip) > MOST_DEVICES:
        raise MeshwrightError(f"{chip.name} with {count:,} devices is too much; the most is {MOST_DEVICES:,}")
    if num_slices < 1:
        raise MeshwrightError(f"{num_slices} slices of {chip.name} are none; take at least 1")
    if chip.torus:
        if len(shape) == 1:
            shape = slice_of(chip, chip.torus, shape[0])
        check_slice(chip, chip.torus, shape)
        if num_slices > 1 and chip.dcn is None:
            raise MeshwrightError(f"{num_slices}*{chip.name} needs a [dcn] table, which {chip.name} does not have")
        return System(chip, shape, num_slices)
    count = math.prod(shape) * num_slices
    if len(shape) > 1 or num_slices > 1:
        raise MeshwrightError(f"{chip.name} takes a number of devices, not slices or shapes: {chip.name}:{count}")
    devices_per_node(chip, count)
    return System(chip, (count,))


def devices_per_node(chip: Chip, num_devices: int) -> int:
    """Return how many devices of each node are used, on the fewest nodes that can have equally many.

    Raises if less than half of each node would be used, as with 13 GPUs on nodes of 8.
    """
    size = chip.levels[0].degree
    if chip.is_shared or num_devices <= size:
        return num_devices
    units = next(n for n in range(math.ceil(num_devices / size), num_devices + 1) if num_devices % n == 0)
    if num_devices // units * 2 < size:
        below = num_devices // size * size
        raise MeshwrightError(
            f"{chip.name}:{num_devices} does not fill its {chip.levels[0].name}s of {size} evenly;"
            f" use {below} or {below + size}"
        )
    return num_devices // units
