"""The state of linear attention in generation: of fixed size for each row, whatever its length."""

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
    """States of all layers with linear attention, for each row.

    The last values of the convolutions' inputs, of queries, keys and values [layers, rows, taps - 1, *channels], and
    the memory of the delta rule [layers, rows, heads, group, key_dim, value_dim] in float32.
    """

    query: Array
    key: Array
    value: Array
    memory: Array


class DeltaCache(NamedTuple):
    """States, and which rows and tokens a step has, see `models.linear_attention`: row, start and count [rows]."""

    state: DeltaState
    row: Array
    start: Array
    count: Array


def abstract_states(model: ModelConfig, layout: ShardingContext, num_rows: int, dtype: Any) -> tuple[DeltaState, ...]:
    """Return the states of a model as shapes and shardings: one for all its layers, none without linear attention.

    dtype: dtype of the convolutions' last inputs.
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
