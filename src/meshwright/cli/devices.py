"""The devices a command runs on: simulated ones on this machine's CPU, or the accelerators that are there."""

from __future__ import annotations

import logging
import os

from meshwright.errors import MeshwrightError
from meshwright.hardware import System

# Simulated devices share a few cores, so one may reach a collective long after the others; XLA gives up after 40 s.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""What JAX is asked for: the kind of chip, and the CPU, which is always there, so that it finds something."""


def claim_devices(system: System) -> None:
    """Have JAX show the devices of `system`, or raise where they are not there. To be called before JAX uses any."""
    if system.chip.kind == "cpu":
        count = f"--xla_force_host_platform_device_count={system.num_devices}"
        # Read when the backend starts; of two settings of one flag XLA takes the last.
        os.environ["XLA_FLAGS"] = " ".join([PATIENCE, os.environ.get("XLA_FLAGS", ""), count])
    import jax

    # Another platform's plugin, installed to compile for it, would look for its devices and complain.
    jax.config.update("jax_platforms", PLATFORMS[system.chip.kind])
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    try:
        count, why = sum(device.platform == system.chip.kind for device in jax.devices()), ""
    except RuntimeError as error:
        count, why = 0, f" ({str(error).splitlines()[0]})"
    if count < system.num_devices:
        raise MeshwrightError(
            f"{system} wants {system.num_devices} {system.chip.kind} devices; this machine has {count}{why};"
            f" cpu:{system.num_devices} simulates as many"
        )
