"""Load parameters from the tensors of a Hugging Face directory, each device reading only its own slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax import Array

from meshwright.description.families.wrappers import text_names
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import Tree, map_leaves
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.aliases import with_known_names
from meshwright.execution.weights.directory import DTYPES, SCALED_DTYPES, Tensor, read_files
from meshwright.execution.weights.fp8 import SUFFIX, with_fp8
from meshwright.execution.weights.int4 import with_int4
from meshwright.execution.weights.mxfp4 import with_mxfp4
from meshwright.execution.weights.places import Place, places, published_family
from meshwright.execution.weights.slices import Bounds, read_slice

NUM_READERS = 8
"""Number of threads that read: copying out of a memory map waits for the disk."""

LeafReader = Callable[[Place, Mapping[str, Tensor], Executor], Any]
"""Reads a parameter, given its place, all tensors by name, and the threads that read."""


def read_tensors(directory: Path, on_note: Callable[[str], None] = lambda note: None) -> dict[str, Tensor]:
    """Return every tensor of a directory by name; a quantised weight is one tensor with its scales.

    For a model of text and images, these are the tensors of the text model only, by their names in a text-only model.

    Args:
        on_note: called with a sentence about weights that are left out.

    Raises:
        MeshwrightError: as in `read_files`, `with_mxfp4`, `with_fp8` and `with_int4`.
    """
    found = with_int4(with_fp8(with_mxfp4(read_files(directory)), directory), directory)
    own = text_names(found)
    if own.left_out:
        on_note(
            f"{directory} is a model of text and images: the text's weights are read, {', '.join(own.left_out)} not"
        )
    return {ours: replace(found[theirs], name=ours) for ours, theirs in own.names.items()}


def load_weights(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    wanted: Tree[jax.ShapeDtypeStruct],
    on_bytes: Callable[[int], None] = lambda n: None,
    other_readers: Mapping[str, LeafReader] | None = None,
) -> Tree[Array]:
    """Return a model's parameters from the tensors of its directory (`read_tensors`).

    Args:
        wanted: shape, dtype and sharding of each parameter; rows that pad the vocabulary become zeros.
        on_bytes: called with the number of bytes of each slice that is read.
        other_readers: for parameters that are not plain arrays, by path, the function that reads each one.

    Raises:
        MeshwrightError: a tensor is missing, extra, of another shape, or not finite.
    """
    where = places(model)
    known = frozenset(name for place in where.values() for _, name in place.names())
    tensors = with_known_names(tensors, known, published_family(model))
    check_tensors(tensors, where, model)
    with ThreadPoolExecutor(NUM_READERS) as readers:

        def read(path: str, leaf: Any) -> Any:
            if other_readers and path in other_readers:
                return other_readers[path](where[path], tensors, readers)
            indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
            holders: dict[Bounds, list[Any]] = {}
            for device, index in indices.items():
                bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
                holders.setdefault(bounds, []).append(device)
            arrays: list[Array] = []
            # At most two slices are in host memory: a slice is on its devices before the next but one is read.
            for bounds, devices in holders.items():
                part = read_slice(where[path], tensors, bounds, leaf.dtype, readers)
                jax.block_until_ready(arrays)
                arrays += [jax.device_put(part, device) for device in devices]
                on_bytes(part.nbytes)
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

        return map_leaves(read, wanted)


def check_tensors(tensors: Mapping[str, Tensor], where: dict[str, Place], model: ModelConfig) -> None:
    """Raise unless the tensors are exactly those of a model, readable and of the right shapes.

    where: the `Place` of each parameter, by the parameter's path.
    """
    known: set[str] = set()
    for path, place in where.items():
        for _, name in place.names():
            known.add(name)
            if name not in tensors:
                raise MeshwrightError(f"the weights of {model.name} have no {name} {list(place.tensor_shape)} ({path})")
            found = tensors[name]
            if not found.is_readable:
                raise MeshwrightError(
                    f"{name} in {found.file} has dtype {found.dtype}; weights are read in {', '.join(DTYPES)}, and in"
                    f" {', '.join(SCALED_DTYPES)} with a {name}{SUFFIX} beside them"
                )
            if found.shape != place.tensor_shape:
                raise MeshwrightError(
                    f"{name} in {found.file} has shape {list(found.shape)}; config.json makes it"
                    f" {list(place.tensor_shape)}"
                )
    if extra := sorted(tensors.keys() - known):
        found = tensors[extra[0]]
        raise MeshwrightError(
            f"{found.file} holds {found.name} {list(found.shape)}, which a model of its config.json does not have"
        )
