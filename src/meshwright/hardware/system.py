"""A chip and how many of them: `v5p:4x4x4`, `2*v5e:16x16`, `h100:64`, `cpu:8`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.hardware.chip import Chip
from meshwright.hardware.load import load_chip, load_hardware, normal_name
from meshwright.hardware.slices import check_slice, slice_of, wraps

_CLOUD_FORM = re.compile(r"(?:(\d+)\s*\*)?\s*([^:*]+?)\s*-\s*(\d+)", re.IGNORECASE)
_FORM = re.compile(r"(?:(\d+)\s*\*)?\s*([^:*]+?)\s*:\s*(\d+(?:\s*x\s*\d+)*)", re.IGNORECASE)


@dataclass(frozen=True)
class System:
    """The hardware a plan is for: slices of one shape, or so many GPUs or simulated devices.

    shape: the chips along each physical axis of a slice; of a switched fabric the number of devices. memory_headroom:
    the share by which a predicted peak of memory is enlarged before it is held against the memory; nothing where None.
    Every figure here is per device, as JAX counts devices, and decimal.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1
    memory_headroom: float | None = None

    def __post_init__(self) -> None:
        if self.memory_headroom is not None and not 0 <= self.memory_headroom < 1:
            raise MeshwrightError(f"memory_headroom is {self.memory_headroom}; it is a share from 0 to below 1, as 0.1")

    @classmethod
    def parse(cls, text: str) -> System:
        """The system of a text, `v5p:4x4x4`; see `parse_system`."""
        return parse_system(text)

    def resized(self, num_chips: int) -> System:
        """As many chips of the same kind, in as many slices; raises where the slices have no such shape."""
        per_slice, rest = divmod(num_chips, self.num_slices)
        if rest:
            raise MeshwrightError(f"{num_chips} chips are not {self.num_slices} slices of one shape")
        system = make_system(self.chip, (per_slice,), num_slices=self.num_slices)
        return replace(system, memory_headroom=self.memory_headroom)

    @property
    def num_chips(self) -> int:
        """All chips, of all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def devices_per_chip(self) -> int:
        """The devices JAX shows for a chip."""
        return self.chip.devices_per_chip

    @property
    def num_devices(self) -> int:
        """All devices, of all slices."""
        return self.num_chips * self.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """The hosts that the chips stand in, each slice on its own."""
        return math.ceil(math.prod(self.shape) / self.chip.chips_per_host) * self.num_slices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each physical axis closes into a ring; empty on a switched fabric."""
        return wraps(self.chip.torus, self.shape) if self.chip.torus else ()

    @cached_property
    def _sharers(self) -> int:
        """The devices that share the figures of a chip: those of the chip, or all simulated ones."""
        return self.num_devices if self.chip.is_shared else self.devices_per_chip

    def peak(self, dtype: str = "bf16") -> float:
        """The operations a second of products in a dtype. Raises where the chip has no figure for it."""
        return self.chip.peak(dtype) / self._sharers

    @property
    def hbm_bytes(self) -> float:
        """The memory as sold, the figure of back-of-the-envelope sums."""
        return self.chip.hbm_bytes / self._sharers

    @property
    def usable_bytes(self) -> float:
        """The memory a program can have: what is physically there without what the runtime keeps."""
        return self.chip.usable_bytes / self._sharers

    @property
    def plannable_bytes(self) -> float:
        """The largest predicted peak that still fits: the usable memory less the headroom."""
        return self.usable_bytes / (1 + (self.memory_headroom or 0.0))

    @property
    def runtime_bytes(self) -> float:
        """The memory that the runtime keeps for itself."""
        return self.chip.runtime_bytes / self._sharers

    @property
    def hbm_bytes_per_second(self) -> float:
        """The bandwidth of the memory."""
        return self.chip.hbm_bytes_per_second / self._sharers

    @property
    def host_bytes_per_second(self) -> float:
        """The bandwidth between device and host, one way."""
        return self.chip.host_bytes_per_second / self._sharers

    def __str__(self) -> str:
        """The system as people type it."""
        slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices}{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_system(text: str, *, hardware_file: str | Path | None = None) -> System:
    """The system that a text names: a chip, and a slice shape or a number of chips (of devices for `gpu` and `cpu`).

    `v5p:4x4x4` is a slice of that shape and `v5e:16` the slice with 16 chips, 4x4; `2*v5e:16x16` two slices joined by
    the data-centre network. Google Cloud's names are understood too: `v6e-256` is 256 chips, `v5p-512` 512 TensorCores
    in 256 chips. With `hardware_file` the chip may also be the one of that TOML file. Raises where the chip
    is not known, or the shape is not one that its slices have.

    >>> str(parse_system("tpu_v5e:16"))
    'v5e:4x4'
    """
    if (cloud := _parse_cloud(text)) is not None:
        return cloud
    match = _FORM.fullmatch(text.strip())
    if match is None:
        slices = re.fullmatch(r"(\d+)\s*x\s*(\D.*)", text.strip())
        hint = f"; several slices are {slices[1]}*{slices[2]}" if slices else ""
        raise MeshwrightError(
            f"hardware {text!r} is not a chip and a shape or count, as v5p:4x4x4, h100:64, cpu:8 or v5p-128{hint}"
        )
    if slices := re.fullmatch(r"(\d+)\s*x\s*([a-z].*)", match[2], re.IGNORECASE):
        raise MeshwrightError(f"hardware {text!r}: several slices are {slices[1]}*{slices[2]}:{match[3]}")
    chip = _find(match[2], hardware_file)
    num_slices, shape = int(match[1] or 1), tuple(int(size) for size in re.split(r"\s*x\s*", match[3].lower()))
    if num_slices < 1 or min(shape) < 1:
        raise MeshwrightError(f"hardware {text!r} has a size 0; sizes are whole numbers from 1")
    return make_system(chip, shape, num_slices=num_slices)


def cloud_note(text: str) -> str | None:
    """What a text that is a Google Cloud name means, where that counts TensorCores and not chips."""
    system = _parse_cloud(text)
    if system is None or system.chip.cloud_cores == 1:
        return None
    cores = system.num_chips * system.chip.cloud_cores
    return f"{text.strip()} is {cores:,} TensorCores in {system.num_chips:,} chips: {system}"


def _parse_cloud(text: str) -> System | None:
    """The system of a Google Cloud name, `v5p-512`; None where the text is none."""
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
"""The devices of the largest system: a search over the meshes of more would not end."""


def make_system(chip: Chip, shape: tuple[int, ...], *, num_slices: int = 1) -> System:
    """The system of a chip and a shape, checked; a single number is a count, as in `parse_system`."""
    if (count := math.prod(shape) * num_slices * chip.devices_per_chip) > MOST_DEVICES:
        raise MeshwrightError(f"{chip.name} with {count:,} devices is too much; the most is {MOST_DEVICES:,}")
    if num_slices < 1:
        raise MeshwrightError(f"{num_slices} slices of {chip.name} are none; take at least 1")
    if chip.torus:
        if len(shape) == 1:
            shape = slice_of(chip, chip.torus, shape[0])
        check_slice(chip, chip.torus, shape)
        if num_slices > 1 and chip.dcn is None:
            raise MeshwrightError(f"{num_slices}*{chip.name} needs a [dcn] table, which {chip.name} has not")
        return System(chip, shape, num_slices)
    count = math.prod(shape) * num_slices
    if len(shape) > 1 or num_slices > 1:
        raise MeshwrightError(f"{chip.name} takes a number of devices, not slices or shapes: {chip.name}:{count}")
    units_of(chip, count)
    return System(chip, (count,))


def units_of(chip: Chip, num_devices: int) -> int:
    """The devices used of each unit of the lowest level (a node): all alike, as few units as hold them.

    Raises where that would leave more than half of every unit empty, as 13 GPUs on nodes of 8 would.
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


def _find(name: str, hardware_file: str | Path | None) -> Chip:
    """The chip of the file where it has the name, else the known one."""
    if hardware_file is None:
        return load_chip(name)
    chip = load_hardware(hardware_file)
    if normal_name(name) != chip.name:
        raise MeshwrightError(
            f"{Path(hardware_file).name} describes {chip.name}, and {name!r} is asked for; take --on {chip.name}:…"
        )
    return chip
