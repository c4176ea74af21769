"""Parameters from the tensors of a Hugging Face directory, each device reading the slices that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.errors import MeshwrightError
from meshwright.step import ModelConfig, Tree
from meshwright.step.parameter_tree import leaves, map_leaves
from meshwright.weights.aliases import with_known_names
from meshwright.weights.directory import DTYPES, Tensor
from meshwright.weights.places import Place, places, published_family

NUM_READERS = 8
"""Threads that read: copying out of a memory map waits for the disk."""


def load_weights(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    wanted: Tree[jax.ShapeDtypeStruct],
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Tree[Array]:
    """The parameters of a model from the tensors of its directory (`read_tensors`).

    Args:
        wanted: shape, dtype and sharding of each parameter. on_bytes: called with the bytes of each slice that was
        read.

    Raises:
        MeshwrightError: a tensor that is missing, extra or of another shape; a file that cannot be read.
    """
    where = places(model)
    known = frozenset(name for place in where.values() for _, name in place.names())
    tensors = with_known_names(tensors, known, published_family(model))
    check_tensors(tensors, where, model)
    with ThreadPoolExecutor(NUM_READERS) as readers:

        def read(path: str, leaf: Any) -> Array:
            place = where[path]
            slices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
            held: dict[tuple[tuple[int, int], ...], Any] = {}
            for index in slices.values():
                bounds = _bounds(index, leaf.shape)
                if bounds not in held:
                    held[bounds] = readers.submit(_read_slice, place, tensors, bounds, leaf.dtype)
            for each in held.values():
                on_bytes(each.result().nbytes)
            arrays = [
                jax.device_put(held[_bounds(index, leaf.shape)].result(), device) for device, index in slices.items()
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

        params = map_leaves(read, wanted)
    for path, array in leaves(params):
        if not jnp.isfinite(jnp.sum(array.astype(jnp.float32) * 0)):
            raise _not_finite(where[path], tensors)
    return params


def _not_finite(place: Place, tensors: Mapping[str, Tensor]) -> MeshwrightError:
    """The error of a parameter that has values which are no numbers: which tensor they are in."""
    for _, name in place.names():
        values = tensors[name].open().astype(np.float32)
        if not np.isfinite(values).all():
            kind = "NaN" if np.isnan(values).any() else "infinite values"
            return MeshwrightError(f"{name} in {tensors[name].file} has {kind}; these weights compute nothing")
    return MeshwrightError(f"the weights have values that are too large for their dtype, in {place.published.name}")


def check_tensors(tensors: Mapping[str, Tensor], where: dict[str, Place], model: ModelConfig) -> None:
    """Raise where a directory has not just the tensors of a model, each of its shape."""
    known: set[str] = set()
    for path, place in where.items():
        for _, name in place.names():
            known.add(name)
            if name not in tensors:
                raise MeshwrightError(f"the weights of {model.name} have no {name} {list(place.tensor_shape)} ({path})")
            found = tensors[name]
            if found.dtype not in DTYPES:
                raise MeshwrightError(
                    f"{name} in {found.file} has dtype {found.dtype}; weights are read in {', '.join(DTYPES)}, not"
                    f" quantised"
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


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _read_slice(
    place: Place, tensors: Mapping[str, Tensor], bounds: tuple[tuple[int, int], ...], dtype: Any
) -> np.ndarray:
    """The part of a parameter within bounds, read from each tensor that has some of it."""
    result = np.empty([stop - start for start, stop in bounds], dtype)
    depth = len(place.stacked)
    within = tuple(slice(start, stop) for start, stop in bounds[depth:])
    for numbers in np.ndindex(*(stop - start for start, stop in bounds[:depth])):
        name = place.name(*(number + start for number, (start, _) in zip(numbers, bounds, strict=False)))
        np.copyto(result[numbers], place.view(tensors[name].open())[within], casting="same_kind")
    return result
