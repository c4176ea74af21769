"""Rotary position embedding (arXiv:2104.09864)."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.blocks import layers
from meshwright.description.step.frequencies import (
    DynamicRopeScaling,
    Frequencies,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)
from meshwright.description.step.layer import Rotary
from meshwright.description.step.model import ModelConfig


class RotaryTables(NamedTuple):
    """Cosines and sines of each dim pair's rotation angle [b, s, size / 2]; b is 1 if rows have the same positions.

    rest: the factor of dims that are not rotated [b, s, 1], by which cosines and sines are multiplied too; None: 1.
    """

    cos: Array
    sin: Array
    rest: Array | None = None


AllTables = Mapping[tuple[Frequencies, int], RotaryTables]
"""The tables of all layers, by (frequencies, number of rotated dims)."""


def rotary_tables(positions: Array, model: ModelConfig, length: Array | int) -> AllTables:
    """Return a model's rotary tables at positions [s], or [b, s] if rows differ.

    Call this once before the layers, because sines are expensive.

    Args:
        length: number of tokens of the sequence, of each row [b], or up to each token [b, s]; the frequencies of some
          models depend on it.
    """
    ops = [op for stack in layers(model) for op in stack.ops if isinstance(op, Rotary)]
    tables = {}
    for frequencies, size in dict.fromkeys((kind, op.size) for op in ops for kind in op.by_layer):
        known = jnp.atleast_1d(length) if frequencies.depends_on_length else jnp.zeros(1, int)
        by_position = _angles(frequencies, size, (known[:, None] if known.ndim == 1 else known)[..., None])
        angles = jnp.atleast_2d(positions)[..., None].astype(jnp.float32) * by_position
        rest = _query_scale(frequencies, positions)
        scale = frequencies.magnitude * (1.0 if rest is None else rest)
        tables[frequencies, size] = RotaryTables(scale * jnp.cos(angles), scale * jnp.sin(angles), rest)
    return tables


def _query_scale(frequencies: Frequencies, positions: Array) -> Array | None:
    """Return the factor of queries at each position, [b, s, 1]; None if the model does not scale queries by position.

    A rotation is linear, so the caller multiplies cosines and sines by the factor.
    """
    if (scaling := frequencies.query_scaling) is None:
        return None
    windows = (jnp.atleast_2d(positions)[..., None] + scaling.offset) // scaling.length
    return 1.0 + scaling.beta * jnp.log1p(windows.astype(jnp.float32))


def rotate(x: Array, op: Rotary, tables: AllTables, layer: Array | int | None) -> Array:
    """Apply the rotary embedding to x [b, s, ..., head_dim] in one layer of a stack.

    Dim i of the first half is paired with dim i of the second, as in Llama's weights from Hugging Face. If the model
    interleaves pairs, they are first reordered to this layout and stay so, for queries and keys alike.
    """
    by = _table_of_layer(op, tables, layer)
    stop = op.start + op.size + op.size % 2
    # Slice the float32 array: with slices of x, XLA:TPU would not reduce-scatter the keys' gradients.
    wide = x.astype(jnp.float32)
    turned = wide[..., op.start : stop]
    if op.is_interleaved:
        turned = jnp.concatenate([turned[..., ::2], turned[..., 1::2]], axis=-1)
    heads = range(2, x.ndim - 1)
    cos, sin = jnp.expand_dims(by.cos, heads), jnp.expand_dims(by.sin, heads)
    first, second = jnp.split(turned, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    before, after = wide[..., : op.start], wide[..., stop:]
    if by.rest is not None and turned.shape[-1] < x.shape[-1]:
        rest = jnp.expand_dims(by.rest, heads)
        before, after = before * rest, after * rest
    return jnp.concatenate([before, turned, after], axis=-1).astype(x.dtype)


def _table_of_layer(op: Rotary, tables: AllTables, layer: Array | int | None) -> RotaryTables:
    """Return the tables of one layer of a stack."""
    kinds = dict.fromkeys(op.by_layer)
    if len(kinds) == 1:
        return tables[op.by_layer[0], op.size]
    own = [tables[kind, op.size] for kind in kinds]
    if any(table.rest is not None for table in own):
        ones = jnp.ones((1, 1, 1), jnp.float32)
        own = [table._replace(rest=ones) if table.rest is None else table for table in own]
    shares = [is_of_kind(kind, op.by_layer, layer).astype(jnp.float32) for kind in kinds]

    def chosen(*arrays: Array) -> Array:
        return functools.reduce(jnp.add, (share * array for share, array in zip(shares, arrays, strict=True)))

    return jax.tree.map(chosen, *own)


def is_of_kind(kind: Hashable, cycle: Sequence[Hashable], layer: Array | int | None) -> Array:
    """Return a boolean scalar: whether cycle[layer % len(cycle)] is `kind`; layers of a stack repeat in a cycle.

    It compares numbers instead of indexing, because in pipeline stages `layer` is an array sharded over stages.
    """
    assert layer is not None, "layers that differ need their number"
    here = jnp.int32(layer) % len(cycle)
    first, *others = (here == number for number, other in enumerate(cycle) if other == kind)
    return functools.reduce(jnp.logical_or, others, first)


def _angles(frequencies: Frequencies, size: int, length: Array) -> Array:
    """Return the angle per position, in radians, of each pair of rotated dims [b, s, size / 2].

    length: number of tokens [b, s, 1], on which some frequencies depend.
    """
    if frequencies.is_identity:
        return jnp.zeros((1, 1, -(-size // 2)), jnp.float32)
    theta, exponents = frequencies.theta, -jnp.arange(0, size, 2, dtype=jnp.float32)[None, None] / size
    angles = theta**exponents
    match frequencies.scaling:
        case LinearRopeScaling(factor=factor):
            return angles / factor
        case Llama3RopeScaling() as scaling:
            # Long wavelengths are stretched by `factor`, short ones are kept, those between are interpolated.
            turns = scaling.original_max_seq_len * angles / (2 * math.pi)
            blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            blend = jnp.clip(blend, 0.0, 1.0)
            return angles * (blend + (1 - blend) / scaling.factor)
        case DynamicRopeScaling(factor=factor, original_max_seq_len=original):
            longer = jnp.maximum(length, original).astype(jnp.float32) / original
            return (theta * (factor * longer - (factor - 1)) ** (size / (size - 2))) ** exponents
        case YarnRopeScaling(factor=factor) as scaling:
            low, high = scaling.ramp(theta, size)
            scaled = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32)[None, None] - low) / (high - low), 0.0, 1.0)
            return angles * (scaled / factor + (1 - scaled))
        case ProportionalRopeScaling(share=share, factor=factor):
            return jnp.where(jnp.arange(size // 2)[None, None] < int(share * size // 2), angles / factor, 0.0)
        case LongRopeScaling(original_max_seq_len=original) as scaling:
            factors = (jnp.array(own, jnp.float32)[None, None] for own in (scaling.long_factor, scaling.short_factor))
            return angles / jnp.where(length > original, *factors)
    return angles
