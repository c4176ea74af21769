"""Which process of a run this is, and the address of the rendezvous."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.options.processes import ProcessArgs

AUTO = "auto"

HOSTED = "MESHWRIGHT_HOSTED"
"""Environment variable that is set in processes whose rendezvous `meshwright launch` hosts, not process 0."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run, and which of them this process is.

    Each process has a part of the devices; all are started with the same arguments.
    """

    coordinator: str | None = None
    """HOST:PORT of process 0; `auto` on clusters that provide it (Slurm, Cloud TPU); None for a single process.

    Process 0 listens on this port and, for JAX, on the next one.
    """
    num_processes: int | None = None
    """The number of processes, all with the same number of devices."""
    process_id: int | None = None
    """The number of this process, from 0. Process 0 writes the run directory and prints."""
    start_seconds: float = 300.0
    """Seconds that the processes wait for each other at the start."""

    def __post_init__(self) -> None:
        """Raise if the options contradict each other."""
        count, number = self.num_processes, self.process_id
        if not 0 < self.start_seconds < 1e6:
            raise MeshwrightError(f"--start-seconds is {self.start_seconds:g}; it is a number of seconds, as 300")
        if self.coordinator in (None, AUTO):
            if (count, number) != (None, None):
                raise MeshwrightError(
                    "--num-processes and --process-id go with --coordinator HOST:PORT, and not with auto"
                )
            return
        split_address(self.coordinator)
        if count is None or number is None or not 0 <= number < count:
            raise MeshwrightError(
                f"--coordinator {self.coordinator} needs --num-processes, from 1, and --process-id, from 0 and below"
                f" that; they are {count} and {number}"
            )

    def found(self, environment: Mapping[str, str] = os.environ) -> Processes:
        """Return the processes with Slurm's values for this job step in place of `auto`; unchanged on other clusters.

        https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES.

        Raises:
            MeshwrightError: Slurm's list of nodes is empty.
        """
        if self.coordinator != AUTO or not environment.keys() >= _SLURM:
            return self
        first = re.match(r"([^,\[]+)(?:\[(\w+))?", environment["SLURM_STEP_NODELIST"])
        if first is None:
            raise MeshwrightError(f"SLURM_STEP_NODELIST is {environment['SLURM_STEP_NODELIST']!r}; it names no node")
        # A port that is the same in all processes of a job and mostly different between jobs; below the ports that
        # Linux assigns (net.ipv4.ip_local_port_range begins at 32768); even, because JAX uses the next one.
        port = 20_000 + int(environment["SLURM_JOB_ID"]) % 6_000 * 2
        return Processes(
            f"{first[1]}{first[2] or ''}:{port}",
            int(environment["SLURM_NTASKS"]),
            int(environment["SLURM_PROCID"]),
            self.start_seconds,
        )


ALONE = Processes()


def processes_of(args: ProcessArgs) -> Processes:
    """Return the processes that the options describe. Raises if `--start-seconds` is given for a single process."""
    if args.start_seconds is not None and args.coordinator is None:
        raise MeshwrightError("--start-seconds goes with --coordinator: a process alone waits for no other")
    return Processes(**{name: value for name, value in vars(args).items() if value is not None})


_SLURM = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"}


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT. Raises if it is not that, or PORT + 1, which JAX uses, is not a port."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16 - 1:
        raise MeshwrightError(
            f"--coordinator {address} is not HOST:PORT, as localhost:1234 (ports to 65534), and not auto"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
