"""Rotary position embedding (arXiv:2104.09864): the sines and cosines of positions, and heads rotated by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.step import ModelConfig
from meshwright.step.blocks import layers
from meshwright.step.layer import Frequencies, LinearRopeScaling, RopeScaling, Rotary


class RotaryTables(NamedTuple):
    """What pairs of a head's dims are rotated by: [b, s, size / 2], b 1 where rows have the same positions."""

    cos: Array
    sin: Array


AllTables = Mapping[tuple[Frequencies, int], RotaryTables]
"""The tables of each kind of layer, by frequencies and the dims they rotate."""


def rotary_tables(positions: Array, model: ModelConfig) -> AllTables:
    """The tables of a model at positions [s], or [b, s] where rows differ.

    LayerOutput once, before the layers: sines cost more than their use.
    """
    ops = [op for stack in layers(model) for op in stack.ops if isinstance(op, Rotary)]
    kinds = dict.fromkeys((frequencies, op.size) for op in ops for frequencies in op.by_layer)
    return {kind: _tables(positions, *kind) for kind in kinds}


def rotate(x: Array, op: Rotary, tables: AllTables, layer: Array | int | None) -> Array:
    """Rotary embedding of x [b, s, ..., head_dim] in one layer of a stack.

    The two halves of what is rotated turn together, as in the published Llama weights.
    """
    own = [tables[frequencies, op.size] for frequencies in op.by_layer]
    by = own[0] if len(own) == 1 else _table_of_layer(own, layer)
    stop = op.start + op.size
    if op.size == x.shape[-1]:
        return _rotated(x, by)
    return jnp.concatenate([x[..., : op.start], _rotated(x[..., op.start : stop], by), x[..., stop:]], axis=-1)


def _table_of_layer(own: list[RotaryTables], layer: Array | int | None) -> RotaryTables:
    """The tables of one layer of a cycle."""
    assert layer is not None, "layers that differ need their number"
    which = jnp.int32(layer) % len(own)
    return RotaryTables(*(jax.lax.select_n(which, *arrays) for arrays in zip(*own, strict=True)))


def _rotated(x: Array, by: RotaryTables) -> Array:
    heads = range(2, x.ndim - 1)
    cos, sin = jnp.expand_dims(by.cos, heads), jnp.expand_dims(by.sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _tables(positions: Array, frequencies: Frequencies, size: int) -> RotaryTables:
    angles = jnp.atleast_2d(positions)[..., None].astype(jnp.float32) * _angles(frequencies, size)
    return RotaryTables(jnp.cos(angles), jnp.sin(angles))


def _angles(frequencies: Frequencies, size: int) -> Array:
    """The angle a position adds, for each pair of rotated dims [size / 2]."""
    angles = frequencies.theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    match frequencies.scaling:
        case LinearRopeScaling(factor=factor):
            return angles / factor
        case RopeScaling() as scaling:
            # Long waves are slowed by `factor`, short ones are left, those between are blended.
            turns = scaling.original_max_seq_len * angles / (2 * math.pi)
            blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            blend = jnp.clip(blend, 0.0, 1.0)
            return angles * (blend + (1 - blend) / scaling.factor)
    return angles
