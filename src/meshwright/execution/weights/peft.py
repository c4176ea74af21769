"""Read and write low-rank adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT has an A [rank, in] and a B [out, rank] for each adapted module. A module that contains several of our matmuls
(c_attn, qkv_proj) has one A for all, while our matmuls have one each: in PEFT's format these become one A of the summed
rank, with a block-diagonal B, which computes the same. PEFT's adapters are read as matmuls with equal A.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.description.families.adapters import ADAPTER_CONFIG, adapter_config, is_adapted, module_scale
from meshwright.description.step.lora import LoRA
from meshwright.description.step.model import ModelConfig, without_lora
from meshwright.description.step.parameter_tree import LORA_A, LORA_B, RANK, Parameter
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import DTYPES, Tensor, read_file, write_file
from meshwright.execution.weights.places import Place, places
from meshwright.support.files import write_file as write_text

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Module:
    """A module of a family's layers with some of our matmuls: each one's path, and place in the module's weight."""

    parts: tuple[tuple[str, Place], ...]

    @property
    def published(self) -> str:
        """The name of the module's weight, with {layer}."""
        return self.parts[0][1].published.name

    @property
    def path(self) -> str:
        """The module's path within a layer, as in PEFT's target_modules."""
        return self.published.split("{layer}.")[1].removesuffix(".weight")

    def names(self) -> Iterator[tuple[int, str, str]]:
        """Yield the number of each layer of the stack, and the names of PEFT's A and B in that layer."""
        for (layer,), name in self.parts[0][1].names():
            module = PREFIX + name.removesuffix(".weight")
            yield layer, f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def write_adapter(
    directory: Path, model: ModelConfig, params: Mapping[str, Any], *, base: str | None, dtype: str = "F32"
) -> None:
    """Write the adapters of a model with PEFT's names into an existing directory.

    Args:
        params: the tree with the model's adapters; arrays may be sharded.
        base: the name of the base model in adapter_config.json.
        dtype: a key of `DTYPES`.
    """
    lora = _lora(model)
    modules = _modules(model)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        stacks = [(place, _stack(params, path)) for path, place in module.parts]
        for layer, name_a, name_b in module.names():
            blocks = [(place, (own[LORA_A][layer], own[LORA_B][layer]) if own else None) for place, own in stacks]
            tensors[name_a], tensors[name_b] = _joined(blocks, lora)
    entries = [(name, array.shape, dtype) for name, array in tensors.items()]
    write_file(directory / ADAPTER_WEIGHTS, entries, lambda name: tensors[name].astype(DTYPES[dtype]))
    write_text(directory / ADAPTER_CONFIG, json.dumps(_config(lora, modules, base), indent=2) + "\n")


def read_adapter(directory: Path, model: ModelConfig) -> dict[str, dict[str, np.ndarray]]:
    """Return the float32 adapters of a model with `lora`, layers stacked, from PEFT's tensors.

    Layers without an adapter (`is_adapted`) have zeros, whose gradients are 0 too: training leaves them as they are.

    Raises:
        MeshwrightError: if a tensor is missing, extra, of another shape, or not finite.
    """
    lora, tensors = _lora(model), {tensor.name: tensor for tensor in read_file(directory / ADAPTER_WEIGHTS)}
    config, found = adapter_config(directory), dict[str, dict[str, list[np.ndarray]]]()
    used = {tensor.name for tensor in saved_tensors(directory).values()}
    for module in _modules(model):
        for _, name_a, name_b in module.names():
            name = name_a.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            if not is_adapted(config, name):
                for path, place in module.parts:
                    a, b = np.zeros((*place.inputs, lora.rank)), np.zeros((lora.rank, *place.outputs))
                    _append(found, path, a.astype(np.float32), b.astype(np.float32))
                continue
            a, b = (_array(name, tensors, directory) for name in (name_a, name_b))
            used |= {name_a, name_b}
            own = module_scale(config, name)
            if a.shape[:1] != (own.rank,) or b.shape[-1:] != (own.rank,):
                raise MeshwrightError(
                    f"{name_a} in {tensors[name_a].file} has shape {list(a.shape)}, and its B {list(b.shape)};"
                    f" {ADAPTER_CONFIG} makes them [{own.rank}, in] and [out, {own.rank}]"
                )
            # All adapters get one rank and one scale: pad with zeros, and multiply B by the ratio of the scales.
            if (rest := lora.rank - own.rank) > 0:
                a, b = np.pad(a, ((0, rest), (0, 0))), np.pad(b, ((0, 0), (0, rest)))
            b = b * np.float32(own.scale / lora.low_rank.scale)
            for path, ours_a, ours_b in _split(module, a, b, lora, tensors[name_a]):
                _append(found, path, ours_a, ours_b)
    if extra := sorted(tensors.keys() - used):
        raise MeshwrightError(f"{tensors[extra[0]].file} holds {extra[0]}, which no target of {ADAPTER_CONFIG} has")
    return {stack: {name: np.stack(layers) for name, layers in own.items()} for stack, own in found.items()}


def _append(found: dict[str, dict[str, list[np.ndarray]]], path: str, a: np.ndarray, b: np.ndarray) -> None:
    """Append a layer's A and B to those of the matmul at `path`."""
    stack, _, name = path.rpartition(".")
    own = found.setdefault(stack, {})
    own.setdefault(f"{name}{LORA_A}", []).append(a)
    own.setdefault(f"{name}{LORA_B}", []).append(b)


def saved_tensors(directory: Path) -> dict[str, Tensor]:
    """Return full weights stored with an adapter (`modules_to_save`), by the names of the weights they replace.

    Raises:
        MeshwrightError: if a module has no tensor.
    """
    modules = adapter_config(directory).get("modules_to_save") or ()
    tensors = list(read_file(directory / ADAPTER_WEIGHTS)) if modules else []
    found: dict[str, Tensor] = {}
    for module in modules:
        held = {
            name: tensor
            for tensor in tensors
            if f".{module}." in (name := tensor.name.removeprefix(PREFIX.removesuffix("."))) and ".lora_" not in name
        }
        if not held:
            raise MeshwrightError(f"{directory / ADAPTER_WEIGHTS} has no {module}, which modules_to_save names")
        found |= {name.removeprefix("."): tensor for name, tensor in held.items()}
    return found


def _lora(model: ModelConfig) -> LoRA:
    if model.lora is None:
        raise MeshwrightError(f"{model.name} has no adapters")
    return model.lora


def _modules(model: ModelConfig) -> list[_Module]:
    """Return the modules with an adapted matmul, each with all matmuls that it holds."""
    found: dict[tuple[str, str], list[tuple[str, Place]]] = {}
    for path, place in places(without_lora(model)).items():  # pyright: ignore[reportArgumentType]
        stack = path.rpartition(".")[0]
        if stack and place.num_inputs:
            found.setdefault((stack, place.published.name), []).append((path, place))
    targets = _lora(model).targets
    return [
        _Module(tuple(sorted(parts, key=lambda part: part[1].published.part)))
        for parts in found.values()
        if any(path.rpartition(".")[2] in targets for path, _ in parts)
    ]


def _stack(params: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the adapters of a matmul, unsharded, for all layers; empty for a matmul without adapters."""
    stack, _, name = path.rpartition(".")
    own = params[stack]
    return {end: np.asarray(own[name + end], np.float32) for end in (LORA_A, LORA_B) if name + end in own}


def _joined(
    blocks: list[tuple[Place, tuple[np.ndarray, np.ndarray] | None]], lora: LoRA
) -> tuple[np.ndarray, np.ndarray]:
    """Return a module's A and B in PEFT's format from those of its matmuls."""
    rank = lora.rank * len(blocks)
    first = blocks[0][0]
    rows = int(np.prod(first.inputs))
    a, b = np.zeros((rank, rows), np.float32), np.zeros(_place_of_b(first, rank).tensor_shape, np.float32)
    for number, (place, factors) in enumerate(blocks):
        if factors is not None:
            own = slice(number * lora.rank, (number + 1) * lora.rank)
            a[own] = factors[0].reshape(rows, lora.rank).T
            _place_of_b(place, rank).view(b)[own] = factors[1]
    return a, b


def _split(
    module: _Module, a: np.ndarray, b: np.ndarray, lora: LoRA, tensor: Tensor
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the path of each matmul of a module, with its A [*inputs, rank] and B [rank, *outputs]."""
    rank, count = a.shape[0], len(module.parts)
    if a.ndim != 2 or rank not in (lora.rank, lora.rank * count) or b.shape[-1:] != (rank,):
        raise MeshwrightError(
            f"{tensor.name} in {tensor.file} has shape {list(a.shape)}, and its B {list(b.shape)};"
            f" {ADAPTER_CONFIG} makes them [{lora.rank}, in] and [out, {lora.rank}]"
        )
    for number, (path, place) in enumerate(module.parts):
        inputs, where = place.inputs, _place_of_b(place, rank)
        if b.shape != where.tensor_shape or a.shape[1] != int(np.prod(inputs)):
            raise MeshwrightError(
                f"{tensor.name} in {tensor.file} is for [{a.shape[1]}, {b.shape[0]}]; the model has"
                f" [{int(np.prod(inputs))}, {where.tensor_shape[0]}] there"
            )
        ours_b, own = where.view(b), slice(0, rank)
        if rank != lora.rank:
            own = slice(number * lora.rank, (number + 1) * lora.rank)
            if np.delete(ours_b, np.r_[own], axis=0).any():
                raise MeshwrightError(
                    f"{tensor.name} in {tensor.file} has rank {rank} and no blocks of rank {lora.rank}, one for each"
                    f" product that it holds"
                )
        yield path, a[own].T.reshape(*inputs, lora.rank), np.array(ours_b[own])


def _place_of_b(place: Place, rank: int) -> Place:
    """Return the part of a module's B [out, rank] that is a matmul's B [rank, *outputs]."""
    shape = (place.parameter.shape[0], rank, *place.outputs)
    parameter = Parameter(shape=shape, axes=(place.parameter.axes[0], *(RANK for _ in shape[1:])))
    return replace(place, parameter=parameter, num_inputs=1, published=replace(place.published, is_transposed=True))


def _array(name: str, tensors: Mapping[str, Tensor], directory: Path) -> np.ndarray:
    """Return a tensor in float32. Raises if it is missing, has an unknown dtype, or is not finite."""
    if name not in tensors:
        raise MeshwrightError(f"{directory / ADAPTER_WEIGHTS} has no {name}; every layer has one of each target")
    tensor = tensors[name]
    if tensor.dtype not in DTYPES:
        raise MeshwrightError(f"{name} in {tensor.file} has dtype {tensor.dtype}; adapters are in {', '.join(DTYPES)}")
    found = np.asarray(tensor.open(), np.float32)
    if not np.isfinite(found).all():
        raise MeshwrightError(f"{name} in {tensor.file} holds values that are no finite numbers")
    return found


def _config(lora: LoRA, modules: list[_Module], base: str | None) -> dict[str, Any]:
    """Return adapter_config.json; the rank of modules with several matmuls is the sum."""
    several = {module.path: len(module.parts) for module in modules if len(module.parts) > 1}
    whole = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": whole,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({module.path for module in modules}),
        "rank_pattern": {path: count * lora.rank for path, count in several.items()},
        "alpha_pattern": {path: count * whole for path, count in several.items()},
        "fan_in_fan_out": not all(module.parts[0][1].published.is_transposed for module in modules),
        "bias": "none",
        "inference_mode": True,
    }
