"""Shared by commands with several processes: options, reports of how a process ended, and division of devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError, TemporaryError
from meshwright.execution.processes.host import FAILED, REFUSED
from meshwright.execution.processes.member import Member
from meshwright.execution.processes.options import Processes
from meshwright.options.declare import option


@dataclass(frozen=True)
class ProcessArgs:
    """Several processes of one mesh, all started with the same arguments. Default: one."""

    coordinator: Annotated[str | None, option("HOST:PORT")] = None
    """Coordinator: HOST:PORT of the first process; auto on Cloud TPU and Slurm."""
    num_processes: Annotated[int | None, option("N")] = None
    """Number of processes, each with as many of the devices."""
    process_id: Annotated[int | None, option("N")] = None
    """Number of this process, from 0; only process 0 prints, writes files and listens."""
    start_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long they wait for each other before they start. Default: 300."""

    @property
    def processes(self) -> Processes:
        """The options as `Processes`."""
        if self.start_seconds is not None and self.coordinator is None:
            raise MeshwrightError("--start-seconds goes with --coordinator: a process alone waits for no other")
        return Processes(**{name: value for name, value in vars(self).items() if value is not None})


@contextmanager
def report_end_to_others(member: Member | None, *failures: type[MeshwrightError]) -> Iterator[None]:
    """Report to the other processes how this one ends, except by Ctrl-C, which all of them get.

    Args:
        member: this process among the others; None for a single process.
        failures: errors that count as failures of a started run; any other is wrong input.
    """
    if member is None:
        yield
        return
    try:
        yield
    except MeshwrightError as error:
        member.fail(str(error), FAILED if isinstance(error, (TemporaryError, *failures)) else REFUSED)
    except Exception:  # Report it before its traceback is printed.
        member.crash()
    member.leave()


def devices_per_process(system: System, count: int, what: str = "processes", instead: str = "leave -n {} out") -> int:
    """Return the number of devices of each process on this machine.

    Args:
        system: the devices of all processes.
        count: the number of processes.
        what: the word for processes in errors.
        instead: what to do instead on a machine whose chips one process drives; `{}` is the count.

    Raises:
        MeshwrightError: devices that cannot be divided equally, or chips that one process must drive.
    """
    if count < 1 or system.num_devices % count:
        raise MeshwrightError(f"{system.num_devices} devices cannot be divided equally among {count} {what}")
    if system.chip.kind == "tpu" and count > 1:
        raise MeshwrightError(
            f"one process drives all chips of a machine of {system.chip.name}; {instead.format(count)}"
        )
    return system.num_devices // count


def process_environments(system: System, num_devices: int, count: int) -> list[Mapping[str, str]]:
    """Return the environment variables of each process, which give it `num_devices` GPUs by CUDA_VISIBLE_DEVICES."""
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
