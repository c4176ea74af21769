"""The compilers' packages, environments, options and topologies for hardware that is not present."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError

Effort = Literal["fast", "default"]

_NOT_INHERITED = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
"""Prefixes of the environment variables that a compiling process does not inherit."""

_PACKAGES = {"tpu": ("libtpu", "libtpu"), "gpu": ("jax_cuda13_plugin", "jax-cuda13-plugin")}

_FAST = 9
"""O0 of XLA's optimization levels (openxla.org/xla/effort_levels), as the number that JAX 0.10.2 and 0.12.0.1 take.

JAX 0.12 has no option `exec_time_optimization_effort` any more. With 0.10.2 and -1.0 it gives the same programs.
"""

_MOST_SIMULATED = 4096
"""The most CPU devices that one process simulates; creating more takes minutes."""

_TPU_DEVICES = {
    "v4": ("TPU v4", 2),
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5", 2),
    "v6e": ("TPU v6 lite", 1),
    "tpu7x": ("TPU7x", 1),
}
"""(`device_kind`, `num_cores`) of the devices that libtpu 0.0.42.1 describes, by chip."""

# Fields that all GPUs since A100 have in common in XLA's target configurations.
_GPU_COMMON = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""


def check_compiler(system: System) -> None:
    """Raise if a system's compiler is not installed or does not know its chip.

    Also raises for more than `_MOST_SIMULATED` simulated CPU devices.
    """
    kind = system.chip.kind
    if kind == "cpu":
        if system.num_devices > _MOST_SIMULATED:
            raise MeshwrightError(
                f"{system.num_devices} devices are too many to simulate; the most are {_MOST_SIMULATED}, and --on names"
                " chips in any number"
            )
        return
    module, package = _PACKAGES[kind]
    if importlib.util.find_spec(module) is None:
        raise MeshwrightError(
            f"compiling for {system} needs {package}, which is not installed: pip install meshwright[{kind}-compiler]"
        )
    if kind == "gpu" and system.chip.name not in _gpus():
        raise MeshwrightError(f"no description of {system.chip.name} for XLA's compiler; it has {', '.join(_gpus())}")


def compiler_name(system: System) -> str:
    """The compiler and its version: `libtpu 0.0.42.1`, `jaxlib 0.10.2`."""
    package = _PACKAGES[system.chip.kind][1] if system.chip.kind in _PACKAGES else "jaxlib"
    return f"{package} {version(package)}"


def platform_of(system: System) -> str:
    """The platform that programs for a system are lowered for, as `lowering_platforms` of JAX names it."""
    return {"gpu": "cuda"}.get(system.chip.kind, system.chip.kind)


def device_kind(system: System) -> tuple[str, int | None]:
    """`device_kind` and `num_cores` (None on CPUs) of a system's devices in JAX; Pallas chooses kernels by them."""
    if system.chip.kind == "tpu":
        return _TPU_DEVICES.get(system.chip.name, (f"TPU {system.chip.name}", 1))
    if system.chip.kind == "gpu":
        gpu = _gpus()[system.chip.name]
        return str(gpu["description"]), int(gpu["core_count"])
    return "cpu", None


def environment(system: System, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that compiles for a system.

    Inherits this process's variables except those that configure JAX and its compilers, so that results do not depend
    on where a program is compiled. JAX itself runs on the CPU; a topology describes the devices.
    """
    # For TPUs and GPUs too: functions that place arrays get CPU devices, which cost nothing until they are used.
    ours = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(system.num_devices)}
    if system.chip.kind == "tpu":
        # libtpu would ask a metadata server which TPU it runs on, and take a lock that belongs to one process.
        ours |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        # libtpu requires a type; any one lets it compile for every TPU family.
        ours["TPU_ACCELERATOR_TYPE"] = "v5litepod-16"
        # Without these the partitioner's warnings stay inside libtpu.
        ours |= {"TPU_MIN_LOG_LEVEL": "0", "TPU_STDERR_LOG_LEVEL": "0"}
    return {key: value for key, value in inherited.items() if not key.startswith(_NOT_INHERITED)} | ours


def compiler_options(system: System, effort: Effort) -> dict[str, Any]:
    """Options for `lowered.compile`; only the TPU compiler has a fast effort.

    `fast` compiles in a fraction of the time and gives the same collectives, but not the schedule or memory of
    `default`. On CPUs only LLVM's optimization is off, as nobody runs the code; the HLO and its memory are the same.
    """
    if system.chip.kind == "cpu":
        return {"xla_backend_optimization_level": 0}
    if system.chip.kind != "tpu" or effort == "default":
        return {}
    # With splash attention beside an all-reduce, libtpu 0.0.42.1 aborts at this level for tpu7x, whatever the slice, in
    # what it makes of the all-reduce for the sparse cores; 0.0.50.1 does not.
    sparse = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": False}
    return {"optimization_level": _FAST} | (sparse if system.chip.name == "tpu7x" else {})


def topology(system: System) -> dict[str, Any]:
    """The arguments of `jax.experimental.topologies.get_topology_desc` for a system of TPUs or GPUs."""
    if system.chip.kind == "gpu":
        hosts = system.num_hosts
        # A stream_executor.GpuTargetConfigProto, as text.
        gpu = dict(_gpus()[system.chip.name])
        description, (major, minor) = gpu.pop("description"), gpu_capability(system)
        fields = "".join(f"  {key}: {value}\n" for key, value in gpu.items() if key != "capability")
        capability = f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
        return {
            "platform": "cuda",
            "target_config": (
                f"gpu_device_info {{\n{_GPU_COMMON}{fields}{capability}}}\n"
                'platform_name: "CUDA"\n'
                "dnn_version_info { major: 9 minor: 8 }\n"
                "runtime_version { major: 12 minor: 9 }\n"
                f'device_description_str: "{description}"\n'
            ),
            "topology": f"1x{hosts}x{system.num_devices // hosts}",  # slices x hosts x GPUs
        }
    shape = (*system.shape, 1)[:3]
    arguments: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": f"{system.chip.name}:{'x'.join(map(str, system.shape))}",
    }
    if system.num_slices > 1:
        arguments["num_slices"] = system.num_slices
    if any(size % host for size, host in zip(shape, (2, 2, 1), strict=True)):
        arguments["chips_per_host_bounds"] = shape  # below libtpu's default, hosts of 2x2 chips
    if system.chip.name == "v4":
        arguments["chip_config_name"] = "megacore"  # else two devices a chip
    return arguments


def gpu_capability(system: System) -> tuple[int, int]:
    """The CUDA compute capability of a system's GPUs: (major, minor)."""
    major, minor = _gpus()[system.chip.name]["capability"]
    return major, minor


@cache
def _gpus() -> Mapping[str, Mapping[str, Any]]:
    """Return the GPU descriptions of gpus.toml, by chip name."""
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
