"""The devices of this machine: the default hardware of answers."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import System, parse_system
from meshwright.errors import MeshwrightError

SIMULATED = 8
"""The default number of simulated devices on a machine without accelerators."""

_ASK = "import jax; found = jax.devices(); print(found[0].platform, len(found), found[0].device_kind, sep='\\n')"


def this_machine(num_devices: int | None = None) -> System:
    """Return this machine's accelerators as a system, or simulated devices if it has none.

    JAX is queried in another process unless it has already started in this one: a prediction must not allocate GPU
    memory, nor start JAX with fewer simulated devices than a later call needs.

    Args:
        num_devices: number of devices to simulate; default: as many as JAX has, or `SIMULATED` if it has only one.

    Raises:
        MeshwrightError: the accelerator is not among the known chips.
    """
    if "jax" in sys.modules and _has_started():
        import jax

        found = jax.devices()
        platform, count, kind = found[0].platform, len(found), found[0].device_kind
    else:
        platform, count, kind = _asked_devices()
    if platform == "cpu":
        return parse_system(f"cpu:{num_devices or (count if count > 1 else SIMULATED)}")
    try:
        chip = load_chip(kind)
    except MeshwrightError as error:
        raise MeshwrightError(f"this machine's {kind} is not known; name hardware: on='v5e:2x4' (--on)") from error
    return parse_system(f"{chip.name}:{count // chip.devices_per_chip}")


def _has_started() -> bool:
    """Whether JAX's backend has started in this process.

    JAX has no public function for this, but rejects another number of CPU devices once the backend has started.
    """
    import jax

    count: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


@cache
def _asked_devices() -> tuple[str, int, str]:
    """Return platform, number and kind (for example `TPU v5e`) of the devices that JAX finds in a child process."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise MeshwrightError(f"JAX finds no devices on this machine ({last}); name hardware: on='v5e:2x4' (--on)")
    platform, count, kind = asked.stdout.splitlines()[-3:]
    return platform, int(count), kind
