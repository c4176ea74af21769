"""`meshwright.load`: load a model from a Hugging Face directory, or from a run, onto a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.description.families.adapters import adapter_config, end_modules, read_adapter_config
from meshwright.description.families.load import load_model
from meshwright.description.families.wrappers import text_config
from meshwright.description.hardware.chip import Chip
from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.lora import UNEMBEDDING
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, map_leaves, merge_trees, parameters
from meshwright.description.step.serving import SERVING_RULES, check_stored_dtypes
from meshwright.description.step.strategy import DEFAULT
from meshwright.description.step.weight_formats import WEIGHT_FORMATS, WeightDtype
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.scaled import is_stored_in, keeps_heads, scaled_readers
from meshwright.execution.models.adapters import merge_adapters, merged_model
from meshwright.execution.models.generation.generate import decode_layout, placed_params
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.models.inference.save import StoredDtype
from meshwright.execution.models.quantised.scaled import in_format
from meshwright.execution.runtime.arrays import DTYPES, abstract_for_inference, fit, shardings
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.text.tokenizer import byte_tokenizer_for, read_json, read_tokenizer
from meshwright.execution.training.pretrained import MODEL_FILES, pretrained_directory, run_tokenizer
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.execution.training.run_directory.resume import restore_params
from meshwright.execution.training.run_directory.run import RunConfig, holds_run, read_config
from meshwright.execution.training.slots import move_to_stage_layout, with_whole_heads
from meshwright.execution.weights.directory import Tensor, tensor_dtype
from meshwright.execution.weights.load import load_weights, read_tensors
from meshwright.execution.weights.peft import read_adapter, saved_tensors
from meshwright.mesh import MeshShape
from meshwright.options.values import read_mesh, read_system
from meshwright.support.extras import require_extra
from meshwright.support.field_types import not_a_choice


def load(
    directory: str | Path,
    *,
    on: str | System | None = None,
    mesh: str | MeshShape | None = None,
    dtype: Dtype | None = None,
    adapter: str | Path | None = None,
    weight_dtype: WeightDtype | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
    on_note: Note = warnings.warn,
) -> LoadedModel:
    """Load a model with its weights onto a mesh; each device reads only its own slices.

    Args:
        directory: a Hugging Face directory (config.json, safetensors, tokenizer.json), or a run of `meshwright train`,
          from which the last complete checkpoint is read.
        on: the hardware, for example "cpu:8"; default: the run's. A Hugging Face directory needs it.
        mesh: for example "1,4,2,1" or "fsdp=4,tp=2"; default: for a run on its own hardware, its mesh if that has no
          pipeline stages, and no sp with linear attention; else fsdp over all devices.
        dtype: dtype of parameters and matmuls; default: the run's, or that of the weights (bf16 or f32).
        adapter: a directory with PEFT's low-rank adapters, which are merged into the weights; not for a run.
        weight_dtype: store the weights of layers in int8, int4 or fp8, with scales, as a server does; such a model
          generates and does nothing else. Default: `dtype`.
        on_bytes: called with the number of bytes of each slice that is read.
        on_note: called with notes for the user.

    Raises:
        MeshwrightError: the directory does not exist, weights do not match config.json, or there are too few devices.
    """
    require_extra("load", "train", "serve")
    found = find_model(directory, on=on, mesh=mesh, dtype=dtype, adapter=adapter, weight_dtype=weight_dtype)
    return found.load(on_bytes=on_bytes, on_note=on_note)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model in a directory, and how to load it; only the headers of its weights have been read.

    Args:
        model: the model, with its adapters merged.
        system: the hardware to load it onto, in `mesh`.
        dtype: dtype of matmuls.
        params_dtype: dtype of parameters.
        stored_dtype: dtype that `LoadedModel.save` writes by default.
        run: the config of a run; None for a Hugging Face directory.
        tensors: the tensors of a Hugging Face directory by name; empty for a run.
        adapter: the directory of PEFT's adapters to merge, and the model with these adapters; None without them.
        notes: notes for the user, shown when the model is loaded.
        weight_dtype: format in which the weights of layers are stored. They are read in it where no other array has to
          be made first: from a directory without adapters to merge, onto a mesh that neither pads nor copies heads.
          Others are read and then quantised.
    """

    path: Path
    model: ModelConfig
    system: System
    mesh: MeshShape
    dtype: Dtype
    params_dtype: Dtype
    stored_dtype: StoredDtype
    run: RunConfig | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    adapter: tuple[Path, ModelConfig] | None = None
    notes: tuple[str, ...] = ()
    weight_dtype: WeightDtype | None = None

    def load(self, *, on_bytes: Callable[[int], None] = lambda n: None, on_note: Note = warnings.warn) -> LoadedModel:
        """Load the model onto its devices; arguments and errors are those of `load`."""
        for each in self.notes:
            on_note(each)
        claim_devices(self.system)
        mesh = build_mesh(self.mesh, jax.devices()[: self.mesh.num_devices])
        if self.run is None:
            files, tokenizer = self.path, read_tokenizer(self.path, vocab=self.model.vocab)
        else:
            files = pretrained_directory(self.run, self.path) if self.run.weights or self.run.tokenizer else None
            tokenizer = run_tokenizer(self.run, self.path)
        with jax.set_mesh(mesh):
            if self.run is None:
                params = self._read_in_format(mesh, on_bytes) or self._read(mesh, ShardingContext(self.mesh), on_bytes)
            else:
                params = restore_params(self.path, self.run, self.mesh, mesh, on_note, dtype=self.params_dtype)
            if self.weight_dtype is not None:
                layout = decode_layout(self.model, self.mesh)
                params = in_format(placed_params(params, self.model, layout), self.model, layout, self.weight_dtype)
        return LoadedModel(
            config=self.model,
            params=params,
            mesh=mesh,
            mesh_shape=self.mesh,
            system=self.system,
            dtype=self.dtype,
            stored_dtype=self.stored_dtype,
            tokenizer=tokenizer or byte_tokenizer_for(self.model.vocab),
            source={name: (files / name).read_bytes() for name in MODEL_FILES if files and (files / name).is_file()},
            seq_len=self.run.workload.seq_len if self.run else _most_positions(self.path),
            sp_method=self.run.strategy.sp_method if self.run else "gather",
            weight_dtype=self.weight_dtype,
        )

    def _read_in_format(self, mesh: Mesh, on_bytes: Callable[[int], None]) -> Any:
        """Return the parameters, those of layers in `weight_dtype`; None if it is None or not for reading.

        Raises:
            MeshwrightError: weights that a checkpoint has in the format cannot be read in it.
        """
        dtype, layout = self.weight_dtype, decode_layout(self.model, self.mesh)
        if dtype is None:
            return None
        has_heads = keeps_heads(self.model, layout)
        if self.adapter is None and has_heads:
            declared = parameters(padded(self.model, self.mesh, SERVING_RULES))
            wanted = abstract_for_inference(declared, mesh, layout, self.params_dtype)
            own = scaled_readers(self.model, mesh, layout, dtype, on_bytes)
            return load_weights(self.tensors, self.model, wanted, on_bytes, own)
        if any(is_stored_in(tensor, dtype) for tensor in self.tensors.values()):
            why, instead = f"mesh {self.mesh} pads or copies its heads", "a smaller tp"
            if self.adapter is not None:
                why, instead = "an adapter is merged", "NAME=DIRECTORY for the adapter"
            raise MeshwrightError(
                f"{self.path} has weights in {dtype}, which cannot stay as they are, because {why}; use {instead},"
                f" another weight_dtype, or none"
            )
        return None

    def _read(self, mesh: Mesh, layout: ShardingContext, on_bytes: Callable[[int], None]) -> Any:
        """Return the parameters on the mesh, read from `tensors`, with adapters merged and heads copied or padded."""
        model = self.model if self.adapter is None else replace(self.adapter[1], lora=None)
        in_file = with_whole_heads(layout, model)
        read, wanted = (
            abstract_for_inference(parameters(padded(each, self.mesh, of.rules)), mesh, of, self.params_dtype)
            for each, of in ((model, in_file), (self.model, layout))
        )
        params = load_weights(self.tensors, model, read, on_bytes)
        if self.adapter is not None:
            params = _with_adapter(params, *self.adapter, mesh, in_file)
        return params if in_file is layout else move_to_stage_layout(params, wanted, self.model, layout, DEFAULT)


def find_model(
    directory: str | Path,
    *,
    on: str | System | None = None,
    mesh: str | MeshShape | None = None,
    dtype: Dtype | None = None,
    adapter: str | Path | None = None,
    weight_dtype: WeightDtype | None = None,
) -> Found:
    """Return the model that `load` would load, with its hardware and mesh. No device is claimed.

    Raises:
        MeshwrightError: as in `load`, except for too few devices and errors in the weights themselves.
    """
    if not isinstance(directory, str | Path) or not Path(directory).is_dir():
        raise MeshwrightError(
            f"there is no directory {str(directory)!r}; give one with config.json and weights, or a run's"
        )
    if dtype is not None and dtype not in list(DTYPES):
        raise MeshwrightError(not_a_choice("dtype", dtype, DTYPES))
    if weight_dtype is not None and weight_dtype not in WEIGHT_FORMATS:
        raise MeshwrightError(not_a_choice("weight_dtype", weight_dtype, WEIGHT_FORMATS))
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise MeshwrightError(f"{path} has no config.json; it is neither a run nor a Hugging Face directory")
    if holds_run(path):
        if adapter is not None:
            raise MeshwrightError(f"{path} is a run, which has its own adapters; leave --adapter {adapter} out")
        run = read_config(path)
        # Adapters are merged into the weights when the checkpoint is read.
        model = merged_model(run.workload.config)
        system = run.system if on is None else read_system(on, run.hardware_file)
        # Pipeline stages are for training: one token would pass through them one after the other. So is sp with linear
        # attention (`check_linear_serving`).
        can_generate = run.mesh.pp == 1 and (run.mesh.sp == 1 or model.attention.linear is None)
        is_same = mesh is None and str(system) == run.hardware and can_generate
        shape = run.mesh if is_same else read_mesh(mesh or "dp=1,fsdp=-1", system.num_devices)
        _check(model, shape, system.chip, weight_dtype)
        return Found(
            path=path,
            model=model,
            system=system,
            mesh=shape,
            dtype=dtype or run.workload.compute_dtype,
            params_dtype=dtype or run.workload.param_dtype,
            stored_dtype=dtype
            or (run.workload.compute_dtype if run.workload.config.lora else run.workload.param_dtype),
            run=run,
            weight_dtype=weight_dtype,
        )
    model = load_model(str(path))
    adapted = (
        None if adapter is None else replace(model, lora=read_adapter_config(Path(adapter), model, takes_saved=True))
    )
    if on is None:
        raise MeshwrightError(f"{path} needs hardware: --on (on=…), as cpu:8 or h100:8; only a run has its own")
    system = read_system(on)
    shape = read_mesh(mesh or "fsdp=-1", system.num_devices)
    _check(model, shape, system.chip, weight_dtype)
    notes: list[str] = []
    tensors = read_tensors(path, notes.append)
    if adapter is not None:
        tensors |= _saved(Path(adapter), model, tensors)
    if adapted is not None:
        model = merged_model(adapted)
    stored = tensor_dtype(tensors)
    kept = dtype or ("bf16" if stored == "bf16" else "f32")
    return Found(
        path=path,
        model=model,
        system=system,
        mesh=shape,
        dtype=kept,
        params_dtype=kept,
        stored_dtype="f16" if stored == "f16" and dtype is None else kept,
        tensors=tensors,
        notes=tuple(notes),
        adapter=None if adapter is None or adapted is None else (Path(adapter), adapted),
        weight_dtype=weight_dtype,
    )


def _with_adapter(
    params: Any, adapter: Path, model: ModelConfig, mesh: Mesh, layout: ShardingContext
) -> dict[str, Any]:
    """Return parameters with the adapters of a directory merged into them. Call it under `jax.set_mesh`.

    model: the model with adapters.
    """
    declared = parameters(padded(model, layout.mesh, layout.rules))
    where = dict(leaves(shardings(declared, mesh, layout)))
    shapes = {path: parameter.shape for path, parameter in leaves(declared)}
    own = map_leaves(
        lambda path, array: jax.device_put(fit(array, shapes[path]), where[path]), read_adapter(adapter, model)
    )
    return jax.jit(lambda params: merge_adapters(params, model))(merge_trees(params, own))


def _saved(adapter: Path, model: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full weights stored with an adapter (`saved_tensors`), by the names of the tensors that they replace.

    Raises:
        MeshwrightError: the model has no tensor of that name, or ties its embedding to its head.
    """
    saved = adapter_config(adapter).get("modules_to_save")
    found = {name: replace(tensor, name=name) for name, tensor in saved_tensors(adapter).items()}
    if not saved and model.tied_embeddings:
        # PEFT writes the embedding table beside the adapter of the embedding and beside that of the head.
        found.pop(end_modules(model)[UNEMBEDDING] + ".weight", None)
        return found
    for name in found:
        if name not in tensors or model.tied_embeddings:
            why = "ties its embedding to its head" if model.tied_embeddings else f"has no {name}"
            raise MeshwrightError(f"{adapter} has {name} in modules_to_save, and {model.name} {why}; that is not read")
    return found


def _most_positions(directory: Path) -> int | None:
    """Return the maximum number of positions in a Hugging Face directory's config.json; None if it has none."""
    config = text_config(read_json(directory / "config.json"), name=directory.name)
    return config.get("max_position_embeddings") or config.get("n_positions")


def _check(model: ModelConfig, mesh: MeshShape, chip: Chip, weight_dtype: WeightDtype | None) -> None:
    """Raise if a model cannot generate on this mesh and chip with its weights in this format, or at all."""
    check_stored_dtypes(chip, weight_dtype=weight_dtype, kv_dtype=None)
    if mesh.pp > 1:
        raise MeshwrightError(f"mesh {mesh} has pipeline stages, which generation does not use; use pp=1")
    check_runnable(model, mesh)
