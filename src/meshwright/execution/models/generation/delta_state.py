"""The state of linear attention in generation, whose size does not depend on a row's length."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from meshwright.description.step.blocks import layers
from meshwright.description.step.layer import LINEAR_HEADS, GatedDelta
from meshwright.description.step.model import ModelConfig
from meshwright.execution.runtime.sharding_context import ShardingContext


class DeltaState(NamedTuple):
    """The states of all layers with linear attention, for each row.

    query, key, value: the last inputs of each convolution [layers, rows, taps - 1, *channels]. memory: the matrix
    memory of the delta rule [layers, rows, heads, group, key_dim, value_dim] in float32.
    """

    query: Array
    key: Array
    value: Array
    memory: Array


class DeltaCache(NamedTuple):
    """The states, and the rows and tokens of a step, as `models.linear_attention` reads them.

    row: each row's index in the states [rows]. start: position of its first token [rows]. count: number of its tokens
    [rows].
    """

    state: DeltaState
    row: Array
    start: Array
    count: Array


def abstract_states(model: ModelConfig, layout: ShardingContext, num_rows: int, dtype: Any) -> tuple[DeltaState, ...]:
    """Return a model's states as `jax.ShapeDtypeStruct`s: (`DeltaState`,), or () without linear attention.

    dtype: dtype of the stored inputs of the convolutions.
    """
    found = [(op, stack.num_layers) for stack in layers(model) for op in stack.ops if isinstance(op, GatedDelta)]
    if not found:
        return ()
    op, lead = found[0][0], (sum(count for _, count in found), num_rows)

    def array(sizes: tuple[int, ...], dtype: Any, *names: str) -> Any:
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), layout.spec("layers", "batch", *names))
        return jax.ShapeDtypeStruct((*lead, *sizes), dtype, sharding=sharding)

    query, key, value = (
        array((op.taps - 1, *(size for _, size in dims)), dtype, "taps", *(name for name, _ in dims))
        for _, _, dims in op.convolved
    )
    memory = (op.num_heads, op.group, op.key_dim, op.value_dim)
    return (DeltaState(query, key, value, array(memory, jnp.float32, LINEAR_HEADS, "group", "head_dim", "head_dim")),)
