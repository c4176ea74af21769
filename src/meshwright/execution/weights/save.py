"""Save parameters as a Hugging Face directory: safetensors in files of a bounded size, and their index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import CHOICE_BIAS, Tree, leaves
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.weights.directory import DTYPES, INDEX, SINGLE, write_file
from meshwright.execution.weights.places import Place, places

MAX_FILE_BYTES = 5_000_000_000
"""Default for the largest size of a file of weights, as in `save_pretrained` of transformers."""


def save_weights(
    directory: Path,
    model: ModelConfig,
    params: Tree[Array],
    dtype: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> None:
    """Write the parameters of a model into an existing directory, as the tensors of its Hugging Face family.

    Only one tensor at a time is in host memory.

    Args:
        dtype: dtype of the tensors, a key of `DTYPES`. Biases that choose experts are always float32, as in
          transformers.
        max_file_bytes: largest size of a file; a tensor that is larger gets its own file.
        on_bytes: called with the number of bytes of each tensor that is written.
    """
    arrays = dict(leaves(params))
    parts: dict[str, list[tuple[str, Place, tuple[int, ...]]]] = {}
    for path, place in places(model).items():
        for numbers, name in place.names():
            parts.setdefault(name, []).append((path, place, numbers))

    def tensor(name: str) -> np.ndarray:
        found = np.empty(shapes[name], DTYPES[dtypes[name]])
        for path, place, numbers in parts[name]:
            own, target = arrays[path], place.view(found)
            part = np.empty(own.shape[len(numbers) :], found.dtype) if own.shape != place.parameter.shape else target
            _copy(own, numbers, part)
            if part is not target:
                target[...] = fit(part, target.shape)
        on_bytes(found.nbytes)
        return found

    shapes = {name: held[0][1].tensor_shape for name, held in parts.items()}
    dtypes = {name: "F32" if held[0][0].endswith(CHOICE_BIAS) else dtype for name, held in parts.items()}
    sizes = {name: math.prod(shape) * np.dtype(DTYPES[dtypes[name]]).itemsize for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    size = 0
    for each, nbytes in sizes.items():
        if files[-1] and size + nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += nbytes
    names = [SINGLE] if len(files) == 1 else [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]  # fmt: skip
    for file, held in zip(names, files, strict=True):
        write_file(directory / file, ((name, shapes[name], dtypes[name]) for name in held), tensor)
    if len(files) > 1:
        weight_map = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy(array: Array, numbers: tuple[int, ...], target: np.ndarray) -> None:
    """Copy one layer and expert of a sharded array, at the indices `numbers`, into `target`, shard by shard."""
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        local = [number - start for number, (start, _) in zip(numbers, bounds, strict=False)]
        if all(0 <= at < stop - start for at, (start, stop) in zip(local, bounds, strict=False)):
            within: Any = tuple(slice(start, stop) for start, stop in bounds[len(numbers) :])
            # NumPy reads the memory of a CPU where it is. JAX compiles a program for every index, but copies no more.
            data = np.asarray(shard.data) if shard.device.platform == "cpu" else shard.data
            target[within] = np.asarray(data[tuple(local)] if local else data)
