"""Save the low-rank adapters of a run as a directory that PEFT loads."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax

from meshwright.errors import MeshwrightError
from meshwright.execution.models.inference.save import StoredDtype, check_target, whole_directory
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.execution.training.run_directory.resume import restore_adapters
from meshwright.execution.training.run_directory.run import read_config
from meshwright.execution.weights.peft import write_adapter
from meshwright.mesh import MeshShape
from meshwright.options.values import read_system


def save_adapter(
    run: str | Path,
    directory: str | Path,
    *,
    on: str = "cpu:1",
    dtype: StoredDtype = "f32",
    on_note: Note = warnings.warn,
) -> int:
    """Write the adapters of a run's last complete checkpoint in PEFT's format; return their number of parameters.

    The directory is complete, or on failure absent.

    Args:
        directory: the directory to write; new or empty.
        on: the hardware; one device of it is used.
        dtype: dtype of the written tensors.

    Raises:
        MeshwrightError: the run has no adapters, or the directory is not empty.
    """
    config, target = read_config(Path(run)), Path(directory)
    model = config.workload.config
    if model.lora is None:
        raise MeshwrightError(f"{run} has no adapters; it trains the parameters of {model.name} themselves")
    check_target(target)
    claim_devices(read_system(on))
    mesh = build_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        adapters = restore_adapters(Path(run), config, mesh, on_note)
    with whole_directory(target) as partial:
        write_adapter(partial, model, adapters, base=config.weights, dtype=dtype.upper())
    return sum(array.size for array in jax.tree.leaves(adapters))
