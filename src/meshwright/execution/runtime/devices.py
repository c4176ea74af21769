"""The devices of a command: simulated ones on this machine's CPU, or its accelerators."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.host import REFUSED
from meshwright.execution.processes.member import Member, join
from meshwright.execution.processes.options import ALONE, Processes, split_address
from meshwright.execution.processes.relay import Relay

# Simulated devices share a few cores, so one may reach a collective long after the others. XLA's default is 40 s.
CPU_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

# Options of mallopt(3), with values that keep glibc from freeing memory. glibc frees the heap of a thread, at most 64
# MiB (HEAP_MAX_SIZE), unless less than M_TOP_PAD would then be left at its end.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NO_TRIMMING, WHOLE_HEAP, NO_MAPPING = -1, 64 << 20, 0

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""Value of `jax_platforms` for each kind of chip; it includes the CPU, so that JAX finds a platform in any case."""


def claim_devices(
    system: System, processes: Processes = ALONE, facts: Mapping[str, Any] | None = None
) -> Member | None:
    """Make JAX use the devices of `system`. Call it before JAX uses any device. Raises if there are too few.

    With several processes, wait for all of them, and return this process's connection to the others; else return None.
    JAX's distributed client starts only after all processes have joined with equal `facts`: on a mismatch it would
    abort the process with a page of C++ output.

    Args:
        system: the devices of all processes together.
        processes: how many processes there are, and which one this is.
        facts: values that must be equal in all processes, such as the config of a run.
    """
    processes = processes.found()
    users_flags = os.environ.get("XLA_FLAGS", "")
    here, several = _devices_here(system, processes), None
    if processes.num_processes is not None:
        several = join(processes, {"--on": str(system)} | dict(facts or {}))
    if system.chip.kind == "cpu":
        count = f"--xla_force_host_platform_device_count={here}"
        # XLA reads the flags when the backend starts; the last setting of a flag counts. Replace an earlier call's
        # flags instead of appending: a variable over 128 kB would keep a process from starting another.
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if flag not in (CPU_COLLECTIVE_TIMEOUT_FLAG, count)]
        os.environ["XLA_FLAGS"] = " ".join([CPU_COLLECTIVE_TIMEOUT_FLAG, *kept, count])
        _keep_freed_memory()
        if several is not None:
            _keep_stdout_from_gloo()
    import jax

    if system.chip.kind == "cpu" and "JAX_NUM_CPU_DEVICES" in os.environ:
        with contextlib.suppress(RuntimeError):  # JAX has already started: its devices are counted below.
            jax.config.update("jax_num_cpu_devices", -1)
    # Otherwise the plugin of another platform, installed only to compile for it, looks for its devices and fails.
    jax.config.update("jax_platforms", PLATFORMS[system.chip.kind])
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    # Runtimes that find no accelerator write pages to stderr; the error shows one line of these. If the user sets
    # XLA_FLAGS, stderr is not caught: for an unknown flag XLA writes a line there and ends the process.
    with tempfile.TemporaryFile() as said:
        saved = os.dup(2)
        if system.chip.kind != "cpu" and not users_flags:
            os.dup2(said.fileno(), 2)
        try:
            _start_distributed(processes, several)
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
        wrong = (
            f"{system} needs {system.num_devices} {system.chip.kind} devices; this machine has {count}{why};"
            f" cpu:{system.num_devices} simulates as many"
        )
        if count and system.chip.kind == "cpu":
            wrong = (
                f"{system} needs {system.num_devices} devices, and this process has started JAX with {count}, which it"
                f" keeps: use {system} first, or in another process"
            )
        if several is not None:
            several.fail(wrong, REFUSED)
        raise MeshwrightError(wrong)
    return several


def _keep_freed_memory() -> None:
    """Keep glibc from returning freed memory to the system.

    XLA:CPU allocates a program's temporaries in each run, and glibc returns allocations over 32 MiB and empty heaps of
    threads to the system. That causes 80,000 page faults a train step, 5% of its time (`benchmarks/train_step.py`).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, NO_TRIMMING)
        libc.mallopt(M_TOP_PAD, WHOLE_HEAP)
        libc.mallopt(M_MMAP_MAX, NO_MAPPING)


def _keep_stdout_from_gloo() -> None:
    """Discard what C++ code writes to stdout: Gloo, XLA:CPU's network library, prints a line for each process group."""
    sys.stdout.flush()
    old, kept = sys.stdout, os.dup(1)
    sys.stdout = open(  # noqa: SIM115
        kept, "w", encoding=old.encoding, errors=old.errors, buffering=1 if os.isatty(kept) else -1
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _start_distributed(processes: Processes, several: Member | None) -> None:
    """Start JAX's distributed service on process 0, and the client of this process; nothing for a single process.

    several: this process's connection to the others; None if JAX finds them, in a cluster that only JAX detects.
    """
    import jax

    if processes.coordinator is None:
        return
    seconds = int(processes.start_seconds)
    if several is None:  # A cluster that JAX detects itself.
        try:
            jax.distributed.initialize(initialization_timeout=seconds)
        except ValueError:
            raise MeshwrightError(
                "--coordinator auto: this is not a job step of Slurm, not a Cloud TPU, nor another cluster that JAX"
                " knows; give --coordinator HOST:PORT with --num-processes and --process-id"
            ) from None
        return
    host, port = split_address(processes.coordinator)
    service = f"{'127.0.0.1' if several.number == 0 else host}:{port + 1}"
    bind = f"{'127.0.0.1' if host in ('localhost', '127.0.0.1') else '[::]'}:{port + 1}"
    if several.number:

        def on_failure(reason: str) -> None:
            several.fail(
                f"port {port} of {host} is open, and {port + 1}, which JAX needs too, is not ({reason})", REFUSED
            )

        relay = Relay(host, port + 1, seconds=processes.start_seconds, on_failure=on_failure)
        service = f"127.0.0.1:{relay.port}"
    # The relay times out first and reports why; JAX would abort the process.
    jax.distributed.initialize(
        service, processes.num_processes, several.number,
        initialization_timeout=seconds + 30, coordinator_bind_address=bind, cluster_detection_method="deactivate",
    )  # fmt: skip


def _devices_here(system: System, processes: Processes) -> int:
    """Return the number of devices of each process. Raises if the devices do not divide equally."""
    count = processes.num_processes or 1
    if system.num_devices % count:
        raise MeshwrightError(f"{system.num_devices} devices cannot be divided equally among {count} processes")
    return system.num_devices // count
