"""Division of a machine's devices among processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError


def devices_per_process(system: System, count: int, what: str = "processes", instead: str = "leave -n {} out") -> int:
    """Return the number of devices of each process on this machine.

    Args:
        system: the devices of all processes.
        count: the number of processes.
        what: the noun for processes in errors.
        instead: advice in the error for a machine whose chips must all be driven by one process; `{}` is the count.

    Raises:
        MeshwrightError: the devices cannot be divided equally, or one process must drive all chips of the machine.
    """
    if count < 1 or system.num_devices % count:
        raise MeshwrightError(f"{system.num_devices} devices cannot be divided equally among {count} {what}")
    if system.chip.kind == "tpu" and count > 1:
        raise MeshwrightError(
            f"one process drives all chips of a machine of {system.chip.name}; {instead.format(count)}"
        )
    return system.num_devices // count


def process_environments(system: System, num_devices: int, count: int) -> list[Mapping[str, str]]:
    """Return the additional environment variables of each process: on GPUs, CUDA_VISIBLE_DEVICES with its own GPUs.

    Args:
        system: the devices of all processes.
        num_devices: number of devices of each process.

    Raises:
        MeshwrightError: CUDA_VISIBLE_DEVICES already names too few GPUs.
    """
    if system.chip.kind != "gpu":
        return [{}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(num_devices * count)]
    if len(names) < num_devices * count:
        raise MeshwrightError(
            f"CUDA_VISIBLE_DEVICES names {len(names)} GPUs of this machine, and {count} processes of {num_devices}"
            f" need {num_devices * count}; over several machines see docs/launch.md"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[number * num_devices : (number + 1) * num_devices])}
        for number in range(count)
    ]
