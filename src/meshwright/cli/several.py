"""What the commands that run as several processes share: their options, and how one tells the others that it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from meshwright.cli.arguments import option
from meshwright.errors import MeshwrightError
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
