"""`meshwright.devices`: JAX's devices of this program, and the text that describes them as hardware of a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.pictures.answers.answer import Answer
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.units import show_bytes, show_count, show_rate

_MOST_ROWS = 16


@dataclass(frozen=True)
class Device:
    """One device of JAX.

    kind: the chip, as JAX calls it. coordinates: of the chip on its torus; None without a torus. slice: the number of
    its TPU slice. memory_bytes: the memory that programs can use. used_bytes: the memory allocated now. Both are None
    if the runtime does not report them.
    """

    id: int
    kind: str
    process: int
    coordinates: tuple[int, ...] | None
    slice: int
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Devices(Answer):
    """The devices of all processes of this program.

    system: the devices as hardware for a plan; None if the accelerator is not a known chip. here: the number of this
    process.
    """

    platform: str
    devices: tuple[Device, ...]
    system: System | None
    here: int

    @property
    def processes(self) -> int:
        """The number of processes."""
        return len({device.process for device in self.devices})

    def to_json(self) -> dict[str, Any]:
        """Return the devices as plain data, in the schema of `meshwright devices --json`."""
        return {
            "platform": self.platform,
            "on": None if self.system is None else str(self.system),
            "process": self.here,
            "devices": [asdict(device) for device in self.devices],
        }

    def print(self) -> None:
        """Print a summary of the devices, then a row for each."""
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        kind = "simulated on this machine's CPU" if self.platform == "cpu" else self.devices[0].kind
        known = f"on={str(self.system)!r}" if self.system else "not a known chip: describe it in a file, hardware=…"
        show(console(), f"{show_count(len(self.devices), 'device')} · {kind} · {processes}   {known}")
        print()
        rows = [
            (
                str(device.id),
                str(device.process),
                ",".join(map(str, device.coordinates)) if device.coordinates is not None else "–",
                str(device.slice),
                show_bytes(device.used_bytes) if device.used_bytes is not None else "–",
                show_bytes(device.memory_bytes) if device.memory_bytes is not None else "–",
            )
            for device in self.devices[:_MOST_ROWS]
        ]
        show(console(), table(("device", "process", "coordinates", "slice", "in use", "memory"), rows, left=()))
        if (rest := len(self.devices) - _MOST_ROWS) > 0:
            print(f"  {rest} more")
        if self.system:
            peak, memory = self.system.peak(), self.system.hbm_bytes
            bandwidth = show_rate(self.system.hbm_bytes_per_second, "B/s")
            print()
            each = "simulated device, whatever this machine has," if self.platform == "cpu" else "device"
            says = f"{show_rate(peak, 'flop/s')} in bf16, and {show_bytes(memory)} of memory at {bandwidth}"
            print(folded(f"plans expect of each {each} {says}"))


def devices() -> Devices:
    """Return JAX's devices with their chip, coordinates, process and memory. This starts JAX.

    Raises:
        MeshwrightError: JAX finds no devices.
    """
    import jax

    from meshwright.execution.runtime.machine import this_machine

    try:
        found = jax.devices()
    except RuntimeError as error:
        raise MeshwrightError(f"JAX finds no devices: {str(error).splitlines()[0]}") from error
    try:
        system = this_machine(len(found))
    except MeshwrightError:
        system = None
    return Devices(
        platform=found[0].platform,
        devices=tuple(map(_device, found)),
        system=system,
        here=jax.process_index(),
    )


def _device(found: Any) -> Device:
    """Return a `jax.Device` as a `Device`. The memory of another process's device is unknown."""
    import jax

    stats = (found.memory_stats() if found.process_index == jax.process_index() else None) or {}
    coordinates = getattr(found, "coords", None)
    return Device(
        id=found.id,
        kind=found.device_kind,
        process=found.process_index,
        coordinates=None if coordinates is None else tuple(coordinates),
        slice=getattr(found, "slice_index", None) or 0,
        memory_bytes=stats.get("bytes_limit"),
        used_bytes=stats.get("bytes_in_use"),
    )
