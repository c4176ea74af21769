"""Dropout that does not depend on the mesh: each token has its own key.

The key is folded from the step's key, the layer, the place within the layer (`Place`), and the token's number in the
batch. Each device samples masks for its own tokens, and samples them again in backward: nothing is communicated or
saved.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.description.step.strategy import Strategy
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.sharding_context import ShardingContext

Place = int
"""Where in a layer dropout is applied: to attention weights, or outputs of attention, MLP, experts or own input."""

WEIGHTS, ATTENTION, MLP, OWN_INPUT = range(4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DropoutRng:
    """The inputs of dropout: its rate, a PRNG key, and each token's number in the batch [b, s] (`token_numbers`)."""

    rate: float = field(metadata={"static": True})
    key: Array
    tokens: Array

    def fold_in(self, number: Array | int) -> DropoutRng:
        """Return the inputs for layer `number`, or for place `number` in a layer (`Place`): only the key differs."""
        return replace(self, key=jax.random.fold_in(self.key, number))

    @property
    def keys(self) -> Array:
        """The key of each token, [b, s]."""
        return jax.vmap(jax.vmap(partial(jax.random.fold_in, self.key)))(self.tokens)


def token_numbers(shape: tuple[int, ...], layout: ShardingContext, strategy: Strategy) -> Array:
    """Return the number of each token of a batch [b, s]: row * s + position in the text, wherever it is stored."""
    batch, length = shape
    order = token_order(length, layout, strategy)
    places = jnp.asarray(np.arange(length) if order is None else order, jnp.uint32)
    rows = layout.place(jnp.arange(batch, dtype=jnp.uint32), "batch")
    return rows[:, None] * length + layout.place(places, "sequence")[None, :]


def dropout(x: Array, rng: DropoutRng | None, layout: ShardingContext, place: Place) -> Array:
    """Apply dropout to x [b, s, d] before it is added to the residual stream."""
    if rng is None or not rng.rate:
        return x
    tokens = layout.place(rng.tokens, "batch", "residual_sequence")
    keys = replace(rng.fold_in(place), tokens=tokens).keys
    return _drop(x, jax.vmap(jax.vmap(partial(_keep_mask, rate=rng.rate, size=x.shape[-1])))(keys), rng.rate)


def dropout_of_weights(weights: Array, rng: DropoutRng | None) -> Array:
    """Apply dropout to attention weights [b, k, g, s, t]."""
    if rng is None or not rng.rate:
        return weights
    _, num_kv_heads, group, _, num_keys = weights.shape
    heads = jnp.arange(num_kv_heads * group, dtype=jnp.uint32).reshape(num_kv_heads, group)
    heads = jax.reshard(heads, jax.P(*jax.typeof(weights).sharding.spec.partitions[1:3]))

    def of_token(key: Array, head: Array) -> Array:
        return _keep_mask(jax.random.fold_in(key, head), rate=rng.rate, size=num_keys)

    # Mapped from the innermost dim out: queries, query heads, kv heads, sequences.
    of_row = jax.vmap(jax.vmap(jax.vmap(of_token, (0, None)), (None, 0)), (None, 0))
    return _drop(weights, jax.vmap(of_row, (0, None))(rng.fold_in(WEIGHTS).keys, heads), rng.rate)


def dropout_of_branch(x: Array, rng: DropoutRng | None, rate: float, name: str) -> Array:
    """Apply dropout to the input x [b, s, n] of the low-rank branch of the matmul `name`.

    Columns of x may be split over devices. Each device samples its own columns: the random bits of an element are a
    hash of its column number and the token's key. rate: the share of elements to drop; the rate of `rng` is not used.
    """
    if rng is None or not rate:
        return x
    spec = jax.typeof(x).sharding.spec
    columns = jax.reshard(jnp.arange(x.shape[-1], dtype=jnp.uint32), jax.P(spec.partitions[2]))
    keys = jax.reshard(rng.fold_in(zlib.crc32(name.encode())).keys, jax.P(*spec.partitions[:2]))
    limit = np.uint32(rate * 2**32)

    def of_column(key: Array, column: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(key, column))[0] >= limit

    of_token = jax.vmap(of_column, (None, 0))
    return _drop(x, jax.vmap(jax.vmap(of_token, (0, None)), (0, None))(keys, columns), rate)


def _keep_mask(key: Array, *, rate: float, size: int) -> Array:
    return jax.random.bernoulli(key, 1 - rate, (size,))


def _drop(x: Array, kept: Array, rate: float) -> Array:
    return jnp.where(kept, x / (1 - rate), 0)
