"""Read and write low-rank adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT has an A [rank, in] and a B [out, rank] for each adapted module. A module of PEFT may contain several matmuls of
meshwright (c_attn, qkv_proj), and has one A for all, while each of the matmuls has its own A. Written in PEFT's format,
the matmuls' A become one A with the sum of their ranks, and B is block-diagonal, which computes the same. An A read
from PEFT becomes the A of each of the matmuls. A lookup has `lora_embedding_A` [rank, rows] and `lora_embedding_B`
[columns, rank]; DoRA has a `lora_magnitude_vector` [out].

In this module, adapter arrays of a matmul are in dicts with the keys `LORA_A`, `LORA_B` and, with DoRA, `LORA_M`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.description.families.adapters import (
    ADAPTER_CONFIG,
    adapter_config,
    end_modules,
    is_adapted,
    module_scale,
)
from meshwright.description.step.lora import EMBEDDING, LoRA
from meshwright.description.step.model import ModelConfig, without_lora
from meshwright.description.step.parameter_tree import LORA_A, LORA_B, LORA_M, RANK, Parameter
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.directory import DTYPES, Tensor, read_file, write_file
from meshwright.execution.weights.places import Place, places
from meshwright.support.files import write_file as write_text

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Module:
    """A module of PEFT, in every layer of a stack of the model.

    parts: for each matmul of the model that the module contains, its path and its place in the module's weight.
    """

    parts: tuple[tuple[str, Place], ...]

    @property
    def published(self) -> str:
        """The name of the module's weight, with {layer} for the layer's number."""
        return self.parts[0][1].published.name

    @property
    def path(self) -> str:
        """The module's path within a layer, as in PEFT's target_modules."""
        return self.published.split("{layer}.")[1].removesuffix(".weight")

    def names(self) -> Iterator[tuple[int, str]]:
        """Yield the number of each layer of the stack, and the module's full name in that layer."""
        for (layer,), name in self.parts[0][1].names():
            yield layer, name.removesuffix(".weight")


def _tensor_names(module: str, is_lookup: bool = False) -> tuple[str, str, str]:
    """Return the names of PEFT's tensors of a module: A, B, and the magnitudes of DoRA."""
    a, b = ("embedding_A", "embedding_B") if is_lookup else ("A.weight", "B.weight")
    return f"{PREFIX}{module}.lora_{a}", f"{PREFIX}{module}.lora_{b}", f"{PREFIX}{module}.lora_magnitude_vector"


def write_adapter(
    directory: Path, model: ModelConfig, params: Mapping[str, Any], *, base: str | None, dtype: str = "F32"
) -> None:
    """Write the adapters of a model in PEFT's format into an existing directory.

    Args:
        params: the tree with the model's adapters; arrays may be sharded.
        base: the name of the base model for adapter_config.json, if known.
        dtype: dtype of the written tensors, a key of `DTYPES`.
    """
    lora = _lora(model)
    modules = _modules(model)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        stacks = [(place, _stack(params, path)) for path, place in module.parts]
        for layer, name in module.names():
            blocks = [(place, {end: array[layer] for end, array in own.items()}) for place, own in stacks]
            tensors |= zip(_tensor_names(name), _joined(blocks, lora, name), strict=False)
    for ours, name in end_modules(model).items():
        if ours in lora.targets:
            ends = zip((LORA_A, LORA_B, LORA_M), _tensor_names(name, ours == EMBEDDING), strict=True)
            tensors |= {
                theirs: np.asarray(params[ours + end], np.float32).T for end, theirs in ends if ours + end in params
            }
    entries = [(name, array.shape, dtype) for name, array in tensors.items()]
    write_file(directory / ADAPTER_WEIGHTS, entries, lambda name: tensors[name].astype(DTYPES[dtype]))
    write_text(directory / ADAPTER_CONFIG, json.dumps(_config(model, modules, base), indent=2) + "\n")


def read_adapter(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """Return the float32 adapters in a directory, as a tree of parameters of a model with `lora`, stacked over layers.

    Layers that the directory does not adapt (`is_adapted`) get zeros, whose gradients are 0 too, so that training does
    not change them.

    Raises:
        MeshwrightError: a tensor is missing, extra, of another shape, or not finite; or only some layers have DoRA.
    """
    lora, config, reader = _lora(model), adapter_config(directory), _Reader(directory, _lora(model))
    found = dict[str, dict[str, list[np.ndarray]]]()
    for module in _modules(model):
        for _, name in module.names():
            if is_adapted(config, name):
                for path, arrays in _split(module, reader.module(name), lora, f"{name} in {directory}"):
                    _append(found, path, arrays)
                continue
            if lora.dora:
                raise MeshwrightError(
                    f"{directory} has DoRA in some layers and none in {name}; it is read of all layers"
                )
            for path, place in module.parts:
                a, b = np.zeros((*place.inputs, lora.rank)), np.zeros((lora.rank, *place.outputs))
                _append(found, path, {LORA_A: a.astype(np.float32), LORA_B: b.astype(np.float32)})
    ends = {}
    for ours, name in end_modules(model).items():
        if ours in lora.targets:
            arrays, shape = reader.module(name, is_lookup=ours == EMBEDDING), (model.embed, model.vocab)
            of_tensors = (arrays[LORA_A].shape[1], arrays[LORA_B].shape[0])
            if of_tensors != (wanted := shape[:: -1 if ours == EMBEDDING else 1]):
                raise MeshwrightError(
                    f"{name} in {directory} is for {list(of_tensors)}; the model has {list(wanted)} there"
                )
            ends |= {ours + end: array.T for end, array in arrays.items()}
    reader.check_all_read()
    return ends | {stack: {name: np.stack(layers) for name, layers in own.items()} for stack, own in found.items()}


class _Reader:
    """Reader of PEFT's tensors by module, converted to the rank and the scale of the model's adapters (`lora`)."""

    def __init__(self, directory: Path, lora: LoRA) -> None:
        self.directory, self.lora, self.config = directory, lora, adapter_config(directory)
        self.tensors = {tensor.name: tensor for tensor in read_file(directory / ADAPTER_WEIGHTS)}
        self.used = {tensor.name for tensor in saved_tensors(directory).values()}

    def module(self, name: str, *, is_lookup: bool = False) -> dict[str, np.ndarray]:
        """Return a module's A [rank, in], B [out, rank] and, with DoRA, magnitudes [out], by `LORA_A` and so on.

        A smaller rank is padded with zeros, and B is multiplied by the module's scale / the model's scale. is_lookup:
        whether the module is an embedding, whose tensors have other names.
        """
        names = dict(
            zip((LORA_A, LORA_B, LORA_M)[: 3 if self.lora.dora else 2], _tensor_names(name, is_lookup), strict=False)
        )
        found = {end: _array(each, self.tensors, self.directory) for end, each in names.items()}
        self.used |= {*names.values()}
        (a, b), own = (found[LORA_A], found[LORA_B]), module_scale(self.config, name)
        if a.shape[:1] != (own.rank,) or b.shape[-1:] != (own.rank,) or (a.ndim, b.ndim) != (2, 2):
            raise MeshwrightError(
                f"{names[LORA_A]} in {self.tensors[names[LORA_A]].file} has shape {list(a.shape)}, and its B"
                f" {list(b.shape)}; {ADAPTER_CONFIG} makes them [{own.rank}, in] and [out, {own.rank}]"
            )
        if self.lora.dora and found[LORA_M].shape != b.shape[:1]:
            raise MeshwrightError(
                f"{names[LORA_M]} in {self.tensors[names[LORA_M]].file} has shape {list(found[LORA_M].shape)}, and B"
                f" {list(b.shape)}"
            )
        if (rest := self.lora.rank - own.rank) > 0:
            a, b = np.pad(a, ((0, rest), (0, 0))), np.pad(b, ((0, 0), (0, rest)))
        return found | {LORA_A: a, LORA_B: b * np.float32(own.scale / self.lora.low_rank.scale)}

    def check_all_read(self) -> None:
        """Raise if the file has a tensor that was not read, because it belongs to no target."""
        if extra := sorted(self.tensors.keys() - self.used):
            file = self.tensors[extra[0]].file
            raise MeshwrightError(f"{file} holds {extra[0]}, which no target of {ADAPTER_CONFIG} has")


def _append(found: dict[str, dict[str, list[np.ndarray]]], path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Append a layer's adapter arrays of the matmul at `path` to found[stack][parameter name]."""
    stack, _, name = path.rpartition(".")
    for end, array in arrays.items():
        found.setdefault(stack, {}).setdefault(name + end, []).append(array)


def saved_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the full weights that are stored with an adapter, by the names of the weights that they replace.

    They are the weights of `modules_to_save`, and embedding tables, which PEFT writes beside adapters of the tables
    (`base_layer`).

    Raises:
        MeshwrightError: a module of `modules_to_save` has no tensor.
    """
    tensors = {
        tensor.name.removeprefix(PREFIX): tensor
        for tensor in read_file(directory / ADAPTER_WEIGHTS)
        if ".lora_" not in tensor.name
    }
    found = {name.replace(".base_layer", ""): each for name, each in tensors.items() if ".base_layer." in name}
    for module in adapter_config(directory).get("modules_to_save") or ():
        held = {name: tensor for name, tensor in tensors.items() if f".{module}." in f".{name}"}
        if not held:
            raise MeshwrightError(f"{directory / ADAPTER_WEIGHTS} has no {module}, which modules_to_save names")
        found |= held
    return found


def _lora(model: ModelConfig) -> LoRA:
    if model.lora is None:
        raise MeshwrightError(f"{model.name} has no adapters")
    return model.lora


def _modules(model: ModelConfig) -> list[_Module]:
    """Return the modules that contain an adapted matmul, each with all matmuls that it contains."""
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
    """Return the adapter arrays [layers, ...] of the matmul at `path`, unsharded; empty for one without adapters."""
    stack, _, name = path.rpartition(".")
    own = params[stack]
    return {end: np.asarray(own[name + end], np.float32) for end in (LORA_A, LORA_B, LORA_M) if name + end in own}


def _joined(blocks: Sequence[tuple[Place, Mapping[str, np.ndarray]]], lora: LoRA, name: str) -> Iterator[np.ndarray]:
    """Yield a module's A, B and, with DoRA, magnitudes in PEFT's format, from the adapter arrays of its matmuls.

    blocks: the place and the adapter arrays of each matmul in one layer. name: the module's name, for messages.

    Raises:
        MeshwrightError: some of the matmuls have magnitudes and others have none.
    """
    rank = lora.rank * len(blocks)
    first = blocks[0][0]
    rows = int(np.prod(first.inputs))
    a, b = np.zeros((rank, rows), np.float32), np.zeros(_place_of_b(first, rank).tensor_shape, np.float32)
    m = np.zeros((b.shape[0], 1), np.float32)
    for number, (place, factors) in enumerate(blocks):
        if factors:
            own = slice(number * lora.rank, (number + 1) * lora.rank)
            a[own] = factors[LORA_A].reshape(rows, lora.rank).T
            _place_of_b(place, rank).view(b)[own] = factors[LORA_B]
        if LORA_M in factors:
            _place_of_b(place, 1).view(m)[0] = factors[LORA_M]
        elif lora.dora:
            raise MeshwrightError(
                f"{name} holds several products, and only some have DoRA; PEFT has it for all of a module, or none"
            )
    yield from (a, b, m[:, 0])[: 3 if lora.dora else 2]


def _split(
    module: _Module, arrays: Mapping[str, np.ndarray], lora: LoRA, what: str
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the path of each matmul of a module, with its A [*inputs, rank], B [rank, *outputs] and magnitudes.

    arrays: the module's arrays in one layer, as `_Reader.module` returns them. what: the module, for messages.
    """
    a, b = arrays[LORA_A], arrays[LORA_B]
    rank, count = a.shape[0], len(module.parts)
    if rank not in (lora.rank, lora.rank * count):
        raise MeshwrightError(f"{what} has rank {rank}; {ADAPTER_CONFIG} makes it {lora.rank}")
    for number, (path, place) in enumerate(module.parts):
        inputs, where = place.inputs, _place_of_b(place, rank)
        if b.shape != where.tensor_shape or a.shape[1] != int(np.prod(inputs)):
            raise MeshwrightError(
                f"{what} is for [{a.shape[1]}, {b.shape[0]}]; the model has"
                f" [{int(np.prod(inputs))}, {where.tensor_shape[0]}] there"
            )
        ours_b, own = where.view(b), slice(0, rank)
        if rank != lora.rank:
            own = slice(number * lora.rank, (number + 1) * lora.rank)
            if np.delete(ours_b, np.r_[own], axis=0).any():
                raise MeshwrightError(
                    f"{what} has rank {rank} and no blocks of rank {lora.rank}, one for each product that it holds"
                )
        found = {LORA_A: a[own].T.reshape(*inputs, lora.rank), LORA_B: np.array(ours_b[own])}
        if LORA_M in arrays:
            found[LORA_M] = np.array(_place_of_b(place, 1).view(arrays[LORA_M][:, None])[0])
        yield path, found


def _place_of_b(place: Place, rank: int) -> Place:
    """Return the `Place` whose view of a module's B [out, rank] is the B [rank, *outputs] of the matmul at `place`."""
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


def _config(model: ModelConfig, modules: list[_Module], base: str | None) -> dict[str, Any]:
    """Return the contents of adapter_config.json; a module with several matmuls has the sum of their ranks."""
    lora = _lora(model)
    several = {module.path: len(module.parts) for module in modules if len(module.parts) > 1}
    whole = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    ends = {name.rpartition(".")[2] for ours, name in end_modules(model).items() if ours in lora.targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": whole,
        "lora_dropout": lora.dropout,
        "use_dora": lora.dora,
        "target_modules": sorted({*ends, *(module.path for module in modules)}),
        "rank_pattern": {path: count * lora.rank for path, count in several.items()},
        "alpha_pattern": {path: count * whole for path, count in several.items()},
        "fan_in_fan_out": not all(module.parts[0][1].published.is_transposed for module in modules),
        "bias": "none",
        "inference_mode": True,
    }
