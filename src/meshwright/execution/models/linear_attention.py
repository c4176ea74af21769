"""Linear attention of one layer: causal convolutions, then the gated delta rule, from an empty or a cached state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import LINEAR_HEADS, GatedDelta
from meshwright.description.step.parameter_tree import DECAY_BIAS, DECAY_LOG
from meshwright.description.step.sequence import is_zigzag
from meshwright.execution.models.context import LayerContext
from meshwright.execution.models.generation.delta_state import DeltaCache, DeltaState
from meshwright.execution.runtime.attention.delta import (
    DeltaInputs,
    causal_convolution,
    chunked_delta_rule,
    delta_rule_step,
)
from meshwright.execution.runtime.attention.split_delta import (
    ids_with_before,
    part_order,
    split_delta_rule,
    values_before,
)
from meshwright.execution.runtime.shards import match_varying, on_shards


def linear_attention(
    values: Mapping[str, Array], weights: Mapping[str, Any], op: GatedDelta, context: LayerContext
) -> tuple[Array, DeltaCache | None]:
    """Return the output of linear attention [b, s, heads, group, value_dim], and the updated cache; None without one.

    Each device has its rows and heads, of whole sequences or if sp splits them of its tokens: only then it communicates
    (`runtime.attention.split_delta`).

    Args:
        values: the layer's values by name, which include the op's inputs.
        weights: the layer's parameters by name.
    """
    layout, cache = context.layout, context.cache
    assert cache is None or isinstance(cache, DeltaCache)
    inputs = [values[name] for name in (op.query, op.key, op.value, op.rate, op.decay)]
    names = ("batch", "sequence", LINEAR_HEADS, "group", "head_dim")
    of_keys, of_values, of_heads = (layout.spec(*own) for own in ((*names[:3], names[4]), names, names[:4]))
    parameters = {name: weights[name] for name in (*(each for each, _, _ in op.convolved), DECAY_LOG, DECAY_BIAS)}
    channels = {name: layout.spec("taps", *(axis for axis, _ in dims)) for name, _, dims in op.convolved}
    own_specs = channels | dict.fromkeys((DECAY_LOG, DECAY_BIAS), layout.spec(LINEAR_HEADS, "group"))
    specs = ([of_keys, of_keys, of_values, of_heads, of_heads], own_specs)
    tokens, rows = layout.spec("batch", "sequence"), layout.spec("batch")
    if cache is None:
        segments, axes = context.positions.segments, layout.axes("sequence")
        ids = None if segments is None or segments.ids is None else segments.ids
        if not axes:
            local = partial(_whole_rows, op=op, axes=layout.axes("batch"))
            run = on_shards(local, layout, in_specs=(*specs, tokens), out_specs=of_values)
            return run(inputs, parameters, ids), None
        order = part_order(layout.mesh.degree(axes), is_zigzag=is_zigzag(layout.mesh, context.strategy))
        local = partial(_split_rows, op=op, axes=(*layout.axes("batch"), *axes), order=order, axis=axes[0])
        run = on_shards(local, layout, in_specs=(*specs, tokens, rows), out_specs=of_values)
        return run(inputs, parameters, ids, context.positions.key_ids), None
    stored = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, cache.state)
    local = partial(_after_state, op=op, axes=layout.axes("batch"))
    in_specs = (*specs, stored, P(), rows, rows, rows)
    out, state = jax.shard_map(local, in_specs=in_specs, out_specs=(of_values, stored))(
        *(inputs, parameters, cache.state, jnp.asarray(context.cache_layer)),
        *(jax.reshard(array, rows) for array in (cache.row, cache.start, cache.count)),
    )
    return out, cache._replace(state=state)


def _whole_rows(
    inputs: list[Array], weights: dict[str, Array], ids: Array | None, *, op: GatedDelta, axes: tuple[str, ...]
) -> Array:
    """Return the output for whole sequences on one device.

    inputs: query, key, value, rate and decay of all tokens. ids: document ids [b, s]; None if each row is one document.
    axes: the mesh axes that split the rows, over which the gradients of `weights` are summed.
    """
    weights = {name: _per_token(weight, axes) for name, weight in weights.items()}
    rows, taps = inputs[0].shape[0], op.taps
    before = [jnp.zeros((rows, taps - 1, *x.shape[2:]), jnp.float32) for x in inputs[:3]]
    ids_before = None if ids is None else jnp.pad(ids, ((0, 0), (taps - 1, 0)), constant_values=-1)
    given = _inputs(inputs, weights, before, ids_before, op)
    out, _ = chunked_delta_rule(*given, ids=ids)
    return out.astype(inputs[0].dtype)


def _split_rows(
    inputs: list[Array],
    weights: dict[str, Array],
    ids: Array | None,
    key_ids: Array | None,
    *,
    op: GatedDelta,
    axes: tuple[str, ...],
    order: np.ndarray,
    axis: str,
) -> Array:
    """Return the output for one device's tokens of sequences that a mesh axis splits.

    Args:
        inputs, op: as in `_whole_rows`.
        ids: document ids of the device's tokens; None if each row is one document.
        key_ids: document ids of whole rows [b, t]; None if each row is one document.
        axes: the mesh axes that split rows and tokens, over which the gradients of `weights` are summed.
        order: see `part_order`.
        axis: the mesh axis that splits sequences.
    """
    weights = {name: _per_token(weight, axes) for name, weight in weights.items()}
    parts = [x.reshape(x.shape[0], order.shape[1], -1, *x.shape[2:]) for x in inputs]
    before = values_before(parts[:3], op.taps - 1, order, axis)
    rows = [x.reshape(-1, *x.shape[2:]) for x in parts]
    longer = None
    if ids is not None and key_ids is not None:
        longer = ids_with_before(ids, key_ids, op.taps, order, axis)
    of_convolution, of_rule = (None, None) if longer is None else (longer[:, 1:], longer[:, op.taps - 1 :])
    given = _inputs(rows, weights, [x.astype(jnp.float32) for x in before], of_convolution, op)
    out = split_delta_rule(given, order, axis, of_rule)
    return out.reshape(inputs[2].shape).astype(inputs[0].dtype)


def _after_state(
    inputs: list[Array],
    weights: dict[str, Array],
    stored: DeltaState,
    layer: Array,
    row: Array,
    start: Array,
    count: Array,
    *,
    op: GatedDelta,
    axes: tuple[str, ...],
) -> tuple[Array, DeltaState]:
    """Return the output for the next tokens of rows on one device, and `stored` with the states after these tokens.

    Args:
        inputs: query, key, value, rate and decay of the tokens.
        stored: states of all layers and of this device's rows; `layer` is this layer's index.
        row: index of each row in the states of all devices [rows]. States of other rows are unchanged; an index past
            the last row writes no state.
        start: position of each row's first token [rows]; at 0 a row starts from an empty state, whatever is stored.
        count: number of tokens of each row [rows]; later tokens are padding, and change no state.
        op, axes: as in `_whole_rows`.
    """
    length, num_rows = inputs[0].shape[1], stored.memory.shape[1]
    at = row - (lax.axis_index(axes) * num_rows if axes else 0)

    def before(array: Array) -> Array:
        own = array.at[layer, at].get(mode="clip").astype(jnp.float32)
        return jnp.where((start > 0).reshape(-1, *(1,) * (own.ndim - 1)), own, 0)

    tails, memory = [before(array) for array in stored[:3]], before(stored.memory)
    given = _inputs(inputs, weights, tails, None, op)
    is_token = (jnp.arange(length)[None] < count[:, None])[:, :, None, None]
    given = given._replace(decay=jnp.where(is_token, given.decay, 0), rate=jnp.where(is_token, given.rate, 0))
    if length == 1:
        out, memory = delta_rule_step(*DeltaInputs(*(x[:, 0] for x in given)), memory)
        out = out[:, None]
    else:
        out, after = chunked_delta_rule(*given, memory)
        assert after is not None
        memory = after
    # The last taps - 1 inputs of the convolutions up to each row's last token, some possibly from earlier calls.
    places = count[:, None] + jnp.arange(op.taps - 1)[None]
    ends = []
    for tail, x in zip(tails, inputs[:3], strict=True):
        longer = jnp.concatenate([tail, x.astype(jnp.float32)], axis=1)
        ends.append(jnp.take_along_axis(longer, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1))
    new = DeltaState(ends[0], ends[1], ends[2], memory)
    at = jnp.where(at < 0, num_rows, at)  # Negative indices would count from the end.
    return out.astype(inputs[0].dtype), jax.tree.map(
        lambda array, own: array.at[layer, at].set(own.astype(array.dtype), mode="drop"), stored, new
    )


def _inputs(
    inputs: list[Array], weights: Mapping[str, Array], before: list[Array], ids: Array | None, op: GatedDelta
) -> DeltaInputs:
    """Return the inputs of the delta rule in float32: convolve query, key and value, and compute rate and decay.

    inputs, ids: as in `_whole_rows`. before: the last taps - 1 inputs of each convolution before these tokens.
    """
    wide = [x.astype(jnp.float32) for x in inputs]
    query, key, value = (
        jax.nn.silu(causal_convolution(x, weights[name].astype(jnp.float32), tail, ids))
        for (name, _, _), x, tail in zip(op.convolved, wide[:3], before, strict=True)
    )
    rate = jax.nn.sigmoid(wide[3])
    bias, log = (weights[name].astype(jnp.float32)[None, None] for name in (DECAY_BIAS, DECAY_LOG))
    return DeltaInputs(query, key, value, -jnp.exp(log) * jax.nn.softplus(wide[4] + bias), rate)


def _per_token(weight: Array, axes: tuple[str, ...]) -> Array:
    """Return a parameter in float32 that varies over `axes`, so that its gradient is summed over them only once."""
    (own,) = match_varying(weight.astype(jnp.float32), axes=axes)
    return own
