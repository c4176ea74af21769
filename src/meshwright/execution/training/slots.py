"""Convert a state between the layout of checkpoints (layers in model order, no padding) and that of a mesh.

With pipeline stages, the stacked layers are in slots, in the order of the stages; some slots may be empty. A mesh may
also pad the vocabulary, heads or experts. Checkpoints have no slots and no padding, so that any mesh can read them.
During conversion, pp shards parameters along embed instead of layers, so that no device stores more than before. The
axes of a padded dim do not divide the unpadded one: during conversion such a vocabulary is replicated, heads are split
along head_dim, and experts along embed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.description.step.blocks import program
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.passes.schedule import slot_layers
from meshwright.description.step.stages import num_cycles, staged_stacks
from meshwright.description.step.strategy import Strategy
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.runtime.sharding_context import ShardingContext

Tree = Any
"""A pytree of arrays or abstract arrays, with the layers of a stack under its name."""


def layer_of_slots(model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> tuple[int | None, ...]:
    """Return, for each slot, the number of its layer, or None if it is empty; without stages, layers in model order.

    If layers of several kinds alternate, numbers are those of their cycles.
    """
    stages = layout.mesh.degree(layout.axes("layers"))
    return slot_layers(num_cycles(model), stages, strategy.virtual_stages if stages > 1 else 1)


def in_order(layout: ShardingContext, model: ModelConfig, strategy: Strategy) -> ShardingContext:
    """Return the sharding context of a state in the layout of checkpoints; `layout` itself if it is already that."""
    rules = layout.rules

    def widened(axes: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of embed with `more`, if all together divide it; else without."""
        return axes if model.embed % layout.mesh.degree((*axes, *more)) else (*axes, *more)

    if layer_of_slots(model, layout, strategy) != tuple(range(num_cycles(model))):
        stages, rules = layout.axes("layers"), {**rules, "layers": ()}
        if (embed := widened(rules["embed"], stages)) != rules["embed"]:
            rules |= {"embed": embed, "vocab": tuple(axis for axis in rules["vocab"] if axis not in stages)}
    stored = padded(model, layout.mesh, rules)
    if stored.vocab != model.vocab:
        rules = {**rules, "vocab": ()}
    if stored.experts != model.experts:
        rules = {**rules, "expert": (), "embed": widened(rules["embed"], rules["expert"])}
    return with_whole_heads(layout if rules is layout.rules else replace(layout, rules=rules), model)


def with_whole_heads(layout: ShardingContext, model: ModelConfig) -> ShardingContext:
    """Return a sharding context without padded or copied kv heads: it splits head_dim instead, if the axes divide it.

    Returns `layout` itself if its axes divide the kv heads.
    """
    axes = layout.rules["kv_heads"]
    stored, full = padded(model, layout.mesh, layout.rules), model.with_full_heads
    if (stored.num_kv_heads, stored.with_full_heads.num_kv_heads) == (model.num_kv_heads, full.num_kv_heads):
        return layout
    sizes = (model.head_dim, full.head_dim)
    is_even = model.attention.latent is None and not any(size % layout.mesh.degree(axes) for size in sizes)
    return replace(layout, rules={**layout.rules, "kv_heads": (), "head_dim": axes if is_even else ()})


def to_stage_layout(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """Return a state with layers moved from model order into pipeline slots. Call under `jax.jit`.

    Empty slots and padding are zeros.

    Args:
        state: the state in the layout of checkpoints, sharded as `in_order`.
        wanted: the abstract state to return, with its shapes and shardings.
        layout: the sharding context of `wanted`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_cycles(model)
    # An index past the end gives zeros.
    rows = np.array([count if layer is None else layer for layer in layers])
    is_same = layers == tuple(range(count))
    return _reshard_as(_fit(state if is_same else _rows(state, rows, model), wanted), wanted)


def move_to_stage_layout(
    state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy
) -> Tree:
    """Do what `to_stage_layout` does, outside of `jax.jit`, and delete the arrays of `state`.

    Arrays are moved one at a time: moving all at once would need memory for two states, which is more than training
    needs.
    """

    @cache  # A parameter and its moments are moved by one program.
    def to_stages(name: str, to: jax.ShapeDtypeStruct) -> Callable[[Tree], Tree]:
        return jax.jit(lambda tree: to_stage_layout(tree, {name: to}, model, layout, strategy))

    def move(path: tuple[Any, ...], array: Array, to: jax.ShapeDtypeStruct) -> Array:
        name = staged_stacks(program(model))[0].name if _is_staged(path, model) else "other"
        moved = jax.block_until_ready(to_stages(name, to)({name: array})[name])
        array.delete()
        return moved

    return jax.tree.map_with_path(move, state, wanted)


def to_order(state: Tree, wanted: Tree, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Tree:
    """Return a state with layers moved from pipeline slots into model order, without padding. Call under `jax.jit`.

    `wanted` is the abstract state to return. It must not shard dims along which layers move or padding is removed;
    `in_order` returns such a sharding context. `layout` is the sharding context of `state`.
    """
    layers, count = layer_of_slots(model, layout, strategy), num_cycles(model)
    state = _reshard_as(state, wanted)
    if layers != tuple(range(count)):
        state = _rows(state, np.array([layers.index(layer) for layer in range(count)]), model)
    return _fit(state, wanted)


def _fit(state: Tree, wanted: Tree) -> Tree:
    """Return a state with each array cut or zero-padded to the shape of the same array of `wanted`."""
    return jax.tree.map(lambda array, to: fit(array, to.shape), state, wanted)


def _reshard_as(state: Tree, wanted: Tree) -> Tree:
    """Return a state with each array resharded like the same array of `wanted`."""
    return jax.tree.map(lambda array, to: jax.reshard(array, to.sharding.spec), state, wanted)


def _rows(state: Tree, rows: np.ndarray, model: ModelConfig) -> Tree:
    """Return a state whose stacked arrays have the layers at the indices `rows`; an index past the end gives zeros.

    The layer dim must not be sharded.
    """

    def take(path: tuple[Any, ...], array: Array) -> Array:
        if not _is_staged(path, model) or array.ndim == 0:
            return array
        spec = jax.typeof(array).sharding.spec
        taken = jax.shard_map(
            lambda x: jnp.take(x, rows, axis=0, mode="fill", fill_value=0), in_specs=spec, out_specs=spec
        )
        return taken(array)

    return jax.tree.map_with_path(take, state)


def _is_staged(path: tuple[Any, ...], model: ModelConfig) -> bool:
    """Whether the array at a path of a state belongs to layers that pipeline stages share."""
    names = {stack.name for stack in staged_stacks(program(model))}
    return any(getattr(key, "key", None) in names for key in path)
