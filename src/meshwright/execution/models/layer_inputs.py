"""An input of its own for each layer, from a second embedding table (`step.layer_inputs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Linear, Lookup, Norm, alternating
from meshwright.description.step.layer_inputs import LAYER_COLUMNS, LAYER_INPUT
from meshwright.description.step.model import ModelConfig
from meshwright.execution.models.context import Weights
from meshwright.execution.models.generation.stationary import stationary_product
from meshwright.execution.models.linear import RESIDUAL, residual_linear
from meshwright.execution.models.norm import norm
from meshwright.execution.runtime.sharding_context import ShardingContext

INPUT_OF_LAYER = (*RESIDUAL[:2], LAYER_INPUT)
"""Logical axes of a layer's own input [b, s, p]."""


def layer_inputs(
    params: Weights, tokens: Array, embedded: Array, model: ModelConfig, layout: ShardingContext
) -> Mapping[str, Array]:
    """Return the inputs [layers, b, s, p] of each stack's layers, by the stack's name; {} if layers have none.

    tokens: [b, s]. embedded: the residual stream [b, s, d] before the layers.
    """
    found = program(model)
    if not found.layer_inputs:
        return {}
    lookup, projection, of_layers = found.layer_inputs
    assert isinstance(lookup, Lookup)
    assert isinstance(projection, Linear)
    assert isinstance(of_layers, Norm)
    own = model.layer_inputs
    if own is not None and own.vocab < model.vocab:
        tokens = jnp.where(tokens < own.vocab, tokens, 0)
    with jax.named_scope("layer_inputs"):
        table = layout.weight(params[lookup.name], "vocab", LAYER_COLUMNS, dtype=embedded.dtype)
        rows = _lookup(table, tokens, layout) * jnp.asarray(lookup.multiplier, embedded.dtype)
        made = outside_layers(embedded, params, projection, layout, LAYER_INPUT)
        shape = (*tokens.shape, model.num_layers, of_layers.size)
        split: Any = layout.spec(*RESIDUAL[:2], "layers", LAYER_INPUT)
        rows, made = (lax.reshape(array, shape, out_sharding=split) for array in (rows, made))
        inputs = rows + norm(made, of_layers, params[of_layers.name])
        by_stack, start = dict[str, Array](), 0
        for group in alternating(found.stacks):
            stop = start + sum(stack.num_layers for stack in group)
            for place, stack in enumerate(group):
                by_stack[stack.name] = jnp.moveaxis(inputs[:, :, start + place : stop : len(group)], 2, 0)
            start = stop
        return by_stack


def outside_layers(x: Array, params: Weights, op: Linear, layout: ShardingContext, columns: str) -> Array:
    """Multiply the residual stream x [b, s, d] by a weight before or after the layers.

    columns: in generation, the logical axis of the result's last dim.
    """
    if layout.cache_split is not None:
        return layout.place(stationary_product(x, params[op.name], op, layout), *RESIDUAL[:2], columns)
    return residual_linear(x, params[op.name], op, layout)


def _lookup(table: Array, tokens: Array, layout: ShardingContext) -> Array:
    """Return the rows [b, s, columns] of a table [v, columns] for tokens [b, s], split like the residual stream.

    The table is not gathered. Over mesh axes that split both its columns and the tokens, each device looks up the
    tokens of all devices in its own columns, and an all-to-all sends each the columns of its tokens. If the axes that
    split its columns split no tokens (in generation), columns are gathered. Devices that split the vocabulary add rows.
    """
    vocab, columns = layout.axes("vocab"), layout.axes(LAYER_COLUMNS)
    of_tokens: Any = jax.typeof(tokens).sharding.spec
    split = {axis for dim in of_tokens for axis in ((dim,) if isinstance(dim, str) else dim or ())}
    sent = columns if split.issuperset(columns) else ()
    along = tuple(axis for axis in vocab if axis in layout.axes("residual_sequence"))
    copied = tuple(axis for axis in vocab if axis not in along)

    def lookup(table: Array, tokens: Array) -> Array:
        # [devices, b, s]: the tokens of all devices that have other columns.
        every = lax.all_gather(tokens, sent) if sent else tokens[None]
        local = every - (lax.axis_index(vocab) * table.shape[0] if vocab else 0)
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
        rows = lax.psum_scatter(rows, along, scatter_dimension=2, tiled=True) if along else rows
        rows = lax.psum(rows, copied) if copied else rows
        return (lax.all_to_all(rows, sent, 0, 3, tiled=True) if sent else rows)[0]

    specs = (jax.typeof(table).sharding.spec, of_tokens)
    made = layout.spec(*RESIDUAL[:2], LAYER_INPUT if sent else LAYER_COLUMNS)
    return layout.place(jax.shard_map(lookup, in_specs=specs, out_specs=made)(table, tokens), *INPUT_OF_LAYER)
