"""`meshwright.load`: a Hugging Face directory, or a run, onto a mesh."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.families import load_model
from meshwright.hardware import System
from meshwright.inference.loaded import LoadedModel
from meshwright.mesh import MeshShape
from meshwright.planner import read_mesh, read_system
from meshwright.runtime import ShardingContext, abstract, build_mesh, claim_devices
from meshwright.step import Dtype, ModelConfig, check_runnable, parameters
from meshwright.text import byte_tokenizer, read_tokenizer
from meshwright.training import BYTES, MODEL_FILES, Note, kept_files, read_config, restore_params, run_tokenizer
from meshwright.weights import load_weights, read_tensors, tensor_dtype


def load(
    directory: str | Path,
    *,
    on: str | System | None = None,
    mesh: str | MeshShape | None = None,
    dtype: Dtype | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
    on_note: Note = warnings.warn,
) -> LoadedModel:
    """Load a model with its weights onto a mesh; each device reads only the slices that it holds.

    Args:
        directory: a Hugging Face directory (config.json, safetensors, tokenizer.json), or one that `meshwright train`
            made, of which the last whole checkpoint is taken.
        on: the hardware, as "cpu:8"; by default that of a run.
        mesh: as "1,4,2,1" or "fsdp=4,tp=2"; by default that of a run, or all devices along fsdp.
        dtype: of parameters and products; by default that of the weights.
        on_bytes: called with the bytes of each slice that was read. on_note: called with what a user should read.

    Raises:
        MeshwrightError: no such directory, weights that are not those of its config.json, devices that are not there.
    """
    path = Path(directory)
    if not path.is_dir():
        raise MeshwrightError(f"there is no directory {str(path)!r}; give one with config.json and weights, or a run's")
    if _is_run(path):
        return _load_run(path, on, mesh, dtype, on_note)
    model = load_model(str(path))
    if on is None:
        raise MeshwrightError(f"{path} is of no run, which would say its hardware; give on, as on='cpu:8'")
    system = read_system(on)
    shape = read_mesh(mesh or "fsdp=-1", system.num_devices)
    claim_devices(system)
    _check(model, shape)
    tensors = read_tensors(path)
    kept: Dtype = dtype or ("bf16" if tensor_dtype(tensors) == "bf16" else "f32")
    built = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(built):
        wanted: Any = abstract(parameters(model), built, ShardingContext(shape), kept)
        params = load_weights(tensors, model, wanted, on_bytes)
    return LoadedModel(
        config=model,
        params=params,
        mesh=built,
        mesh_shape=shape,
        dtype=kept,
        tokenizer=read_tokenizer(path, vocab=model.vocab) or (byte_tokenizer() if model.vocab == BYTES else None),
        source=_source(path),
    )


def _load_run(
    path: Path, on: str | System | None, mesh: str | MeshShape | None, dtype: Dtype | None, on_note: Note
) -> LoadedModel:
    """The model of the last whole checkpoint of a run."""
    config = read_config(path)
    system = config.system if on is None else read_system(on, config.hardware_file)
    # Stages are for training: one token would go through them one after the other.
    is_same = mesh is None and str(system) == config.hardware and config.mesh.pp == 1
    shape = config.mesh if is_same else read_mesh(mesh or "dp=1,fsdp=-1", system.num_devices)
    claim_devices(system)
    model: Any = config.workload.config
    _check(model, shape)
    built = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(built):
        params = restore_params(path, config, shape, built, on_note)
    kept: Dtype = dtype or config.workload.compute_dtype
    return LoadedModel(
        config=model,
        params=params,
        mesh=built,
        mesh_shape=shape,
        dtype=kept,
        tokenizer=run_tokenizer(config, path) or byte_tokenizer(),
        source=_source(kept_files(config, path)) if config.weights or config.tokenizer else {},
        seq_len=config.workload.seq_len,
    )


def _source(directory: Path) -> dict[str, bytes]:
    """The files of a Hugging Face directory that are kept beside its weights."""
    return {name: (directory / name).read_bytes() for name in MODEL_FILES if (directory / name).is_file()}


def _is_run(path: Path) -> bool:
    """Whether a directory is a run's: its config.json then says its workload."""
    try:
        return "workload" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _check(model: ModelConfig, mesh: MeshShape) -> None:
    """Raise where a model cannot run, or not on a mesh."""
    if mesh.pp > 1:
        raise MeshwrightError(f"mesh {mesh} has stages, through which a token goes one by one; load with pp=1")
    check_runnable(model, mesh)
