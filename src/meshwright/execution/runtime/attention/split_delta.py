"""The gated delta rule over sequences that a mesh axis splits; call these functions inside `jax.shard_map`.

Over a part of a sequence, the delta rule maps the state S before it to A S + B after it, and adds Q S to the outputs of
an empty state; all three are computed beside these outputs, in one pass over the chunks. A and B of all parts are
all-gathered, so that each device computes the states before its own parts (as LASP-2, arXiv:2502.07563, gathers the
states of linear attention without A). A chain of sends would move states alone, half of these bytes, but each send
would wait for the one before it.

A device has one part, or with tokens in zigzag order two (`ring.zigzag`), which are rows of a batch here.

Dims: m parts of a device, p parts of all devices in the order of the sequence, t tokens of a part; others as in
`attention.delta`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.execution.runtime.attention.delta import DeltaInputs, chunked_delta_rule
from meshwright.execution.runtime.attention.ring import zigzag


def part_order(degree: int, *, is_zigzag: bool) -> np.ndarray:
    """Return the place in the sequence of each device's parts [degree, m]."""
    return (zigzag(2 * degree, degree) if is_zigzag else np.arange(degree)).reshape(degree, -1)


def values_before(parts: list[Array], count: int, order: np.ndarray, axis: str) -> list[Array]:
    """Return the `count` values before each part of arrays [b, m, t, ...], as [b m, count, ...]; before the first: 0.

    Each device sends the last values of its part, those of all arrays as one, to the next device; those of a second
    part go to the device before it.
    """
    if not count:
        return [jnp.zeros((x.shape[0] * x.shape[1], 0, *x.shape[3:]), x.dtype) for x in parts]
    assert parts[0].shape[2] >= count, "a part has fewer tokens than the next reads of it (`least_length`)"
    last = [x[:, :, -count:].reshape(*x.shape[:2], count, -1) for x in parts]
    own = jnp.concatenate(last, axis=-1)
    pairs = [(device, device + 1) for device in range(len(order) - 1)]
    found = [lax.ppermute(own[:, 0], axis, pairs)]
    if order.shape[1] == 2:
        # On the last device the second part follows the first.
        back = lax.ppermute(own[:, 1], axis, [(after, device) for device, after in pairs])
        found.append(jnp.where(lax.axis_index(axis) == len(order) - 1, own[:, 0], back))
    ends = np.cumsum([x.shape[-1] for x in last])[:-1]
    before = jnp.split(jnp.stack(found, axis=1), ends, axis=-1)
    return [x.reshape(-1, count, *own.shape[3:]) for x, own in zip(before, parts, strict=True)]


def ids_with_before(ids: Array, key_ids: Array, count: int, order: np.ndarray, axis: str) -> Array:
    """Return the document ids of each part's tokens, after those of the `count` tokens before it [b m, count + t].

    Before the first part, whose values and state before it are zeros, they are those at the end of the sequence.

    Args:
        ids: document ids of this device's tokens [b, m t].
        key_ids: document ids of whole rows [b, p t], in storage order.
    """
    stored = np.argsort(order, axis=None)[order - 1]
    parts = key_ids.reshape(key_ids.shape[0], order.size, -1)
    before = parts[:, jnp.asarray(stored)[lax.axis_index(axis)], -count:]
    return jnp.concatenate([before, ids.reshape(*before.shape[:2], -1)], axis=2).reshape(before[:, :, 0].size, -1)


def split_delta_rule(inputs: DeltaInputs, order: np.ndarray, axis: str, ids: Array | None = None) -> Array:
    """Return the outputs of all tokens of this device's parts [b m, t, k, g, v].

    Args:
        inputs: see `DeltaInputs`, with dims [b m, t, ...].
        order: see `part_order`.
        axis: the mesh axis.
        ids: document ids of the token before each part and of its tokens [b m, 1 + t]; None if a row is one document.
            Each document starts from an empty state.
    """
    rows, _, heads, group, value_dim = inputs.value.shape
    factor = jnp.broadcast_to(jnp.eye(inputs.key.shape[-1]), (rows, heads, group, *(inputs.key.shape[-1],) * 2))
    if ids is not None:
        factor = jnp.where((ids[:, 0] == ids[:, 1])[:, None, None, None, None], factor, 0)
        ids = ids[:, 1:]
    found, after = chunked_delta_rule(*inputs, jnp.pad(factor, ((0, 0),) * 4 + ((value_dim, 0),)), ids)
    assert after is not None
    state = _states_before(after, order, axis, value_dim)
    return found[..., :value_dim] + jnp.einsum("bskgd,bkgdv->bskgv", found[..., value_dim:], state)


def _states_before(after: Array, order: np.ndarray, axis: str, value_dim: int) -> Array:
    """Return the state before each part of this device [b m, k, g, d, v].

    after: B and A of each part in one array [b m, k, g, d, v + d].
    """
    own = after.reshape(-1, order.shape[1], *after.shape[1:])
    gathered = lax.all_gather(own, axis, axis=1, tiled=True)[:, np.argsort(order, axis=None)]
    added, factor = (jnp.moveaxis(x, 1, 0) for x in (gathered[..., :value_dim], gathered[..., value_dim:]))

    def part(state: Array, own: tuple[Array, Array]) -> tuple[Array, Array]:
        added, factor = own
        state = added + jnp.einsum("bkgde,bkgev->bkgdv", factor, state)
        return state, state

    # The first part starts from an empty state, so the state after it is B, and nobody reads the one after the last.
    first = added[:1]
    states = [jnp.zeros_like(first), first]
    if order.size > 2:
        states.append(lax.scan(part, first[0], (added[1:-1], factor[1:-1]))[1])
    here = jnp.asarray(order)[lax.axis_index(axis)]
    return jnp.moveaxis(jnp.concatenate(states)[here], 0, 1).reshape(-1, *first.shape[2:])
