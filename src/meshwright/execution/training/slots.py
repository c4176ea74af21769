"""Convert a state between model order, used by checkpoints, and pipeline slots.

Checkpoints have layers in model order without empty slots, so that any mesh can read them. During conversion, pp shards
parameters along embed instead of layers, so no device holds more than before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.passes.schedule import slot_layers
from meshwright.description.step.stages import num_staged_layers
from meshwright.description.step.strategy import Strategy
from meshwright.execution.runtime.sharding_context import ShardingContext

Tree = Any
"""A pytree of arrays or abstract arrays, with layers under the name `layers`."""


def layer_of_slots(model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> tuple[int | None, ...]:
    """Return the layer in each slot of the stacked layers, None if empty; model order without pipeline stages."""
    stages = layout.mesh.degree(layout.axes("layers"))
    return slot_layers(num_staged_layers(model), stages, strategy.virtual_stages if stages > 1 else 1)


def in_order(layout: ShardingContext, model: ModelConfig, strategy: Strategy) -> ShardingContext:
    """Return the layout of a state with its layers in model order; the same layout if its slots are in that order."""
    if layer_of_slots(model, layout, strategy) == tuple(range(num_staged_layers(model))):
        return layout
    stages, rules = layout.axes("layers"), {**layout.rules, "layers": ()}
    stored = (*rules["embed"], *stages)
    if model.embed % layout.mesh.degree(stored) == 0:
        free = tuple(axis for axis in rules["vocab"] if axis not in stages)
        rules |= {"embed": stored, "vocab": free}
    return replace(layout, rules=rules)


def to_stage_layout(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """Move layers from model order, sharded as `in_order`, into pipeline slots, sharded as `wanted`.

    Empty slots are zeros. Call under `jax.jit`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_staged_layers(model)
    # An index past the end gives zeros.
    rows = np.array([count if layer is None else layer for layer in layers])
    is_same = layers == tuple(range(count))
    return _reshard_as(state if is_same else _rows(state, rows), wanted)


def to_order(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """Move layers from pipeline slots into model order, sharded as `wanted`.

    If layers change their position, `wanted` must have them whole over pp, as `in_order` has. Call under `jax.jit`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_staged_layers(model)
    if layers == tuple(range(count)):
        return _reshard_as(state, wanted)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, wanted)
    whole = jax.tree.map(jax.reshard, state, specs)
    return _rows(whole, np.array([layers.index(layer) for layer in range(count)]))


def _reshard_as(state: Tree, wanted: Tree) -> Tree:
    """Reshard each array of a state like the same array of `wanted`."""
    return jax.tree.map(lambda array, to: jax.reshard(array, to.sharding.spec), state, wanted)


def _rows(state: Tree, rows: np.ndarray) -> Tree:
    """Take rows of the stacked layer arrays, whose layer axis must not be sharded; a row past the end is zeros."""

    def take(path: tuple[Any, ...], array: Array) -> Array:
        if not any(getattr(key, "key", None) == "layers" for key in path) or array.ndim == 0:
            return array
        spec = jax.typeof(array).sharding.spec
        taken = jax.shard_map(
            lambda x: jnp.take(x, rows, axis=0, mode="fill", fill_value=0), in_specs=spec, out_specs=spec
        )
        return taken(array)

    return jax.tree.map_with_path(take, state)
