"""The devices of a command: simulated ones on this machine's CPU, or its accelerators."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
import tempfile
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.hardware import System

# Simulated devices share a few cores, so that one may reach a collective long after the others. XLA's default is 40 s.
CPU_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# Options of mallopt(3), with values that switch them off. A thread's heap of at most 64 MiB (glibc's HEAP_MAX_SIZE) is
# freed unless that would leave less than the pad at its end.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NO_TRIMMING, WHOLE_HEAP, NO_MAPPING = -1, 64 << 20, 0

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""`jax_platforms` by kind of chip; with the CPU as well, so that JAX finds a platform in any case."""

AUTO = "auto"


@dataclass(frozen=True)
class Processes:
    """The processes of one run. Each has a part of the devices; all are started with the same arguments."""

    coordinator: str | None = None
    """HOST:PORT of the first process, or auto on clusters that JAX knows (Cloud TPU, Slurm); None for one process."""
    num_processes: int | None = None
    """The number of processes, each with as many devices."""
    process_id: int | None = None
    """The number of this process, from 0. The first writes the run directory and prints."""


ALONE = Processes()


def claim_devices(system: System, processes: Processes = ALONE) -> None:
    """Make JAX use the devices of `system`. Call it before JAX uses any device. Raises if there are too few.

    With several processes, waits for all of them.
    """
    here = _devices_here(system, processes)
    if system.chip.kind == "cpu":
        count = f"--xla_force_host_platform_device_count={here}"
        # Read when the backend starts; of two settings of one flag XLA takes the last.
        os.environ["XLA_FLAGS"] = " ".join([CPU_COLLECTIVE_TIMEOUT_FLAG, os.environ.get("XLA_FLAGS", ""), count])
        _keep_freed_memory()
    import jax

    if system.chip.kind == "cpu" and "JAX_NUM_CPU_DEVICES" in os.environ:
        with contextlib.suppress(RuntimeError):  # JAX has begun: it counts what is there below.
            jax.config.update("jax_num_cpu_devices", -1)
    # Otherwise another platform's plugin, installed for compiling, looks for its devices and fails.
    jax.config.update("jax_platforms", PLATFORMS[system.chip.kind])
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    if processes.coordinator is not None:
        address = None if processes.coordinator == AUTO else processes.coordinator
        try:
            jax.distributed.initialize(address, processes.num_processes, processes.process_id)
        except (RuntimeError, ValueError) as error:
            raise MeshwrightError(
                f"the processes did not meet at --coordinator {processes.coordinator}: {str(error).splitlines()[0]}"
            ) from None
    # Runtimes write pages to stderr where they find no accelerator, of which one line is told.
    with tempfile.TemporaryFile() as said:
        saved = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            count, why = sum(device.platform == system.chip.kind for device in jax.devices()), ""
        except RuntimeError as error:
            count, why = 0, f" ({str(error).splitlines()[0]})"
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        said.seek(0)
        if count >= system.num_devices:
            os.write(2, said.read())
    if count < system.num_devices:
        raise MeshwrightError(
            f"{system} wants {system.num_devices} {system.chip.kind} devices; this machine has {count}{why};"
            f" cpu:{system.num_devices} simulates as many"
        )


def _keep_freed_memory() -> None:
    """Keep glibc from returning freed memory to the system.

    XLA:CPU allocates a program's temporaries in each run, and glibc returns allocations over 32 MiB and empty heaps of
    threads to the system: 80,000 page faults, 5% of the time of a train step (`benchmarks/train_step.py`).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, NO_TRIMMING)
        libc.mallopt(M_TOP_PAD, WHOLE_HEAP)
        libc.mallopt(M_MMAP_MAX, NO_MAPPING)


def _devices_here(system: System, processes: Processes) -> int:
    """The number of devices of one process. Raises for contradictory options."""
    count, number = processes.num_processes, processes.process_id
    if processes.coordinator in (None, AUTO):
        if (count, number) != (None, None):
            raise MeshwrightError("--num-processes and --process-id go with --coordinator HOST:PORT, and not with auto")
        return system.num_devices
    host, _, port = (processes.coordinator or "").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise MeshwrightError(
            f"--coordinator {processes.coordinator} is not HOST:PORT, as localhost:1234, and not auto"
        )
    if count is None or number is None or not 0 <= number < count:
        raise MeshwrightError(
            f"--coordinator {processes.coordinator} wants --num-processes, from 1, and --process-id, from 0 and below"
            f" that; they are {count} and {number}"
        )
    if system.num_devices % count:
        raise MeshwrightError(f"{count} processes cannot have the same part of {system.num_devices} devices each")
    return system.num_devices // count
