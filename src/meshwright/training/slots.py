"""A state between two orders of its layers: that of the model, which checkpoints have, and that of a pipeline's slots.

Checkpoints hold layers in the model's order, without empty slots, so that each is read on any mesh. On the way layers
are whole over pp, and parameters lie in shards along embed instead: nothing of a state is ever larger on a device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.runtime import ShardingContext
from meshwright.step import ModelConfig, Strategy, num_staged_layers
from meshwright.step.passes.schedule import slot_layers

Tree = Any
"""Arrays or their abstract values in any pytree, those of layers under the name `layers`."""


def layer_of_slots(model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> tuple[int | None, ...]:
    """The layer in each slot of a layout's stacks; in their own order where the layout splits none."""
    stages = layout.mesh.degree(layout.axes("layers"))
    return slot_layers(num_staged_layers(model), stages, strategy.virtual_stages if stages > 1 else 1)


def in_order(layout: ShardingContext, model: ModelConfig, strategy: Strategy) -> ShardingContext:
    """The layout of a state whose layers are in their order: the same where slots are too."""
    if layer_of_slots(model, layout, strategy) == tuple(range(num_staged_layers(model))):
        return layout
    stages, rules = layout.axes("layers"), {**layout.rules, "layers": ()}
    stored = (*rules["embed"], *stages)
    if model.embed % layout.mesh.degree(stored) == 0:
        free = tuple(axis for axis in rules["vocab"] if axis not in stages)
        rules |= {"embed": stored, "vocab": free}
    return replace(layout, rules=rules)


def to_stage_layout(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """A state with its layers in the slots of a layout, laid as `wanted`, from one that lies as `in_order` says.

    Empty slots are zeros. To be called under `jax.jit`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_staged_layers(model)
    # An index past the end gives zeros.
    rows = np.array([count if layer is None else layer for layer in layers])
    is_same = layers == tuple(range(count))
    return _reshard_as(state if is_same else _rows(state, rows), wanted)


def to_order(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """The way back: a state of slots with its layers in their order, laid as `wanted`, which lies as `in_order` says.

    To be called under `jax.jit`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_staged_layers(model)
    if layers == tuple(range(count)):
        return _reshard_as(state, wanted)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, wanted)
    whole = jax.tree.map(jax.reshard, state, specs)
    return _rows(whole, np.array([layers.index(layer) for layer in range(count)]))


def _reshard_as(state: Tree, wanted: Tree) -> Tree:
    """A state laid as another."""
    return jax.tree.map(lambda array, to: jax.reshard(array, to.sharding.spec), state, wanted)


def _rows(state: Tree, rows: np.ndarray) -> Tree:
    """A state with rows of the arrays of layers, of which each device has all."""

    def take(path: tuple[Any, ...], array: Array) -> Array:
        if not any(getattr(key, "key", None) == "layers" for key in path) or array.ndim == 0:
            return array
        spec = jax.typeof(array).sharding.spec
        taken = jax.shard_map(
            lambda x: jnp.take(x, rows, axis=0, mode="fill", fill_value=0), in_specs=spec, out_specs=spec
        )
        return taken(array)

    return jax.tree.map_with_path(take, state)
