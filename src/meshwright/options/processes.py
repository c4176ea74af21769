"""Options of several processes of one mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.options.declare import option


@dataclass(frozen=True)
class ProcessArgs:
    """Several processes of one mesh, all started with the same arguments. Default: one."""

    coordinator: Annotated[str | None, option("HOST:PORT")] = None
    """Coordinator: HOST:PORT of the first process; auto on Cloud TPU and Slurm."""
    num_processes: Annotated[int | None, option("N")] = None
    """Number of processes, among which the devices are divided equally."""
    process_id: Annotated[int | None, option("N")] = None
    """Number of this process, from 0; only process 0 prints, writes files and listens."""
    start_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long the processes wait for each other before they start. Default: 300."""
