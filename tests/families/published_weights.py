"""Weights drawn by NumPy under our names, and the same as a published checkpoint has them.

Used by the test of published logits and by the script that makes them, which runs without JAX.
"""

import zlib

import numpy as np

from meshwright.families import PUBLISHED
from meshwright.step.parameter_tree import leaves, parameters


def draw(model):
    """Every parameter of a model by path, of a size at which each matters for the logits."""
    return {path: _draw(path, parameter) for path, parameter in leaves(parameters(model))}


def _draw(path, parameter):
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    noise = rng.standard_normal(parameter.shape, np.float32)
    if parameter.role == "vector":
        return 0.3 * noise + (1 if parameter.init == "ones" else 0)
    return noise * (0.5 if parameter.role == "table" or "vocab" in parameter.axes else 2 * parameter.scale)


def published(model):
    """The tensors of a published checkpoint of the model that `draw` draws."""
    names = next(known.names for known in PUBLISHED if known.family == model.family)
    parts, found = {}, {}
    for path, array in draw(model).items():
        stack, _, name = path.rpartition(".")
        place = names[f"layers.{name}" if stack else name]
        first = model.num_dense_layers if model.experts and stack == "layers" else 0
        for layer, own in enumerate(array if stack else array[None]):
            experts = own if "expert_" in name else own[None]
            for expert, each in enumerate(experts):
                full = place.name.format(layer=first + layer, expert=expert)
                parts.setdefault(full, {})[place.part[0]] = (_matrix(each, name), place)
    for full, held in parts.items():
        arrays, place = [held[index][0] for index in sorted(held)], held[min(held)][1]
        if place.by_head:
            heads = [array.reshape(*array.shape[:-1], model.num_heads, -1) for array in arrays]
            joined = np.stack(heads, axis=-2).reshape(*arrays[0].shape[:-1], -1)
        else:
            joined = np.concatenate(arrays, axis=-1)
        found[full] = joined.T if place.is_transposed else joined
    return found


def _matrix(array, name):
    """A parameter with its heads as one dim: those of the input of `output`, else those of the output."""
    if name.endswith("_bias"):
        return array.reshape(-1)
    if name == "output":
        return array.reshape(-1, array.shape[-1])
    return array.reshape(array.shape[0], -1) if array.ndim > 2 else array
