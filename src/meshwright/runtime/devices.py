"""The devices a command runs on: simulated ones on this machine's CPU, or the accelerators that are there."""

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

# Simulated devices share a few cores, so one may reach a collective long after the others; XLA gives up after 40 s.
CPU_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# Of mallopt(3), and values that switch off what they name: a thread's heap, which is of 64 MiB at most (glibc's
# HEAP_MAX_SIZE), is given back unless that would leave less at its end than the pad.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NO_TRIMMING, WHOLE_HEAP, NO_MAPPING = -1, 64 << 20, 0

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""What JAX is asked for: the kind of chip, and the CPU, which is always there, so that it finds something."""

AUTO = "auto"


@dataclass(frozen=True)
class Processes:
    """The processes of one run; each has a part of the devices, and all are started with the same arguments."""

    coordinator: str | None = None
    """Where the processes of one run meet, as HOST:PORT of the first; auto where the cluster says it all (Cloud TPU,
    Slurm). Without it there is one process."""
    num_processes: int | None = None
    """How many processes there are, each with as many of the devices."""
    process_id: int | None = None
    """Which of them this is, from 0; the first writes the run directory and prints."""


ALONE = Processes()


def claim_devices(system: System, processes: Processes = ALONE) -> None:
    """Have JAX show the devices of `system`, or raise where they are not there. To be called before JAX uses any.

    With several processes, once all of them have come.
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
    # Another platform's plugin, installed to compile for it, would look for its devices and complain.
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
    """Have this process keep memory that is freed for what is allocated next, where its malloc is glibc's.

    XLA:CPU allocates the temporaries of a program anew each time it runs, and glibc hands back what is over 32 MiB, and
    the heaps of threads that are empty: a train step then spends its time on page faults, 80,000 of them and 5% of it
    in `benchmarks/train_step.py`.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, NO_TRIMMING)
        libc.mallopt(M_TOP_PAD, WHOLE_HEAP)
        libc.mallopt(M_MMAP_MAX, NO_MAPPING)


def _devices_here(system: System, processes: Processes) -> int:
    """The devices of a system that one process has, checked."""
    said = (processes.num_processes, processes.process_id)
    if processes.coordinator in (None, AUTO):
        if said != (None, None):
            raise MeshwrightError("--num-processes and --process-id go with --coordinator HOST:PORT, and not with auto")
        return system.num_devices
    host, _, port = (processes.coordinator or "").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise MeshwrightError(
            f"--coordinator {processes.coordinator} is not HOST:PORT, as localhost:1234, and not auto"
        )
    count, number = said
    if count is None or number is None or not 0 <= number < count:
        raise MeshwrightError(
            f"--coordinator {processes.coordinator} wants --num-processes, from 1, and --process-id, from 0 and below"
            f" that; they are {count} and {number}"
        )
    if system.num_devices % count:
        raise MeshwrightError(f"{count} processes cannot have the same part of {system.num_devices} devices each")
    return system.num_devices // count
