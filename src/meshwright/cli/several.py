"""What the commands that run as several processes share: their options, and how one tells the others that it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from meshwright.cli.arguments import option
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.processes import FAILED, REFUSED, Member, Processes


@dataclass(frozen=True)
class ProcessArgs:
    """Several processes of one mesh, all started with the same arguments. Default: one."""

    coordinator: Annotated[str | None, option("HOST:PORT")] = None
    """Where the processes meet: HOST:PORT of the first; auto where the cluster says it (Cloud TPU, Slurm)."""
    num_processes: Annotated[int | None, option("N")] = None
    """How many processes there are, each with as many of the devices."""
    process_id: Annotated[int | None, option("N")] = None
    """Which of them this is, from 0; only the first prints, writes files and listens."""
    start_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long they wait for each other before they start. Default: 300."""

    @property
    def processes(self) -> Processes:
        """The processes that are asked for."""
        return Processes(**{name: value for name, value in vars(self).items() if value is not None})


@contextmanager
def telling_others(several: Member | None, *failures: type[MeshwrightError]) -> Iterator[None]:
    """Tell the other processes, where there are some, how this one ends; not of Ctrl-C, which all get.

    failures: errors of what has begun; others refuse wrong input.
    """
    if several is None:
        yield
        return
    try:
        yield
    except MeshwrightError as error:
        several.fail(str(error), FAILED if isinstance(error, failures) else REFUSED)
    except Exception:  # Whatever it was, the other processes are told before its traceback.
        several.crash()
    several.leave()


def devices_of_each(system: System, number: int, what: str = "processes", instead: str = "leave -n {} out") -> int:
    """The devices of each of several processes of this machine.

    Raises:
        MeshwrightError: devices that cannot be shared so.
    """
    if number < 1 or system.num_devices % number:
        raise MeshwrightError(f"{number} {what} cannot have the same part of {system.num_devices} devices each")
    if system.chip.kind == "tpu" and number > 1:
        raise MeshwrightError(
            f"one process drives all chips of a machine of {system.chip.name}; {instead.format(number)}"
        )
    return system.num_devices // number


def environments_of(system: System, each: int, count: int) -> list[Mapping[str, str]]:
    """What each process has in its environment: its share of the machine's GPUs."""
    if system.chip.kind != "gpu":
        return [{}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(each * count)]
    if len(names) < each * count:
        raise MeshwrightError(
            f"CUDA_VISIBLE_DEVICES names {len(names)} GPUs of this machine, and {count} processes of {each} want"
            f" {each * count}; over several machines see docs/launch.md"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[number * each : (number + 1) * each])} for number in range(count)]
