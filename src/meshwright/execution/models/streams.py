"""AltUp: several residual streams, mixed before each layer and corrected after it (`step.layer_inputs.AltUp`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.description.step.blocks import program
from meshwright.description.step.model import ModelConfig
from meshwright.execution.models.context import Weights
from meshwright.execution.models.layer_inputs import outside_layers
from meshwright.execution.models.linear import RESIDUAL
from meshwright.execution.runtime.sharding_context import ShardingContext


def widened(params: Weights, x: Array, model: ModelConfig, layout: ShardingContext) -> Array:
    """Return all streams [b, s, streams, d] for the embedded tokens x [b, s, d]; x itself without AltUp."""
    ops = program(model).widening
    if not ops:
        return x
    with jax.named_scope("streams"):
        others = (outside_layers(x, params, op, layout, RESIDUAL[2]) for op in ops)
        return jnp.stack([x, *_as_large(others, x)], axis=2)


def narrowed(params: Weights, x: Array, model: ModelConfig, layout: ShardingContext) -> Array:
    """Return the mean [b, s, d] of all streams [b, s, streams, d] after the layers; x itself without AltUp."""
    ops = program(model).narrowing
    if not ops:
        return x
    with jax.named_scope("streams"):
        first, *others = (x[:, :, number] for number in range(len(ops) + 1))
        made = (outside_layers(other, params, op, layout, RESIDUAL[2]) for op, other in zip(ops, others, strict=True))
        return sum(_as_large(made, first), first) / (len(ops) + 1)


def predicted(streams: Array, logits: Array, weight: Array) -> Array:
    """Return every stream plus a sum of all streams [b, s, n, d], weighted by factors of each token.

    logits: the router's [b, s, n], float32. weight: [n * n, n]; row i * n + j gives the factor of stream j in stream i.
    """
    count = streams.shape[2]
    factors = _factors(logits, weight).astype(streams.dtype)
    made = [
        streams[:, :, into]
        + sum(factors[:, :, into * count + other, None] * streams[:, :, other] for other in range(count))
        for into in range(count)
    ]
    return jnp.stack(made, axis=2)


def corrected(streams: Array, active: Array, logits: Array, weight: Array) -> Array:
    """Return the predicted streams [b, s, n, d] plus what the layer changed in the first one, times factors.

    active: the first stream after the layer [b, s, d]. logits: as in `predicted`. weight: [n, n], by output.
    """
    factors = (_factors(logits, weight) + 1.0).astype(streams.dtype)
    return streams + factors[..., None] * (active - streams[:, :, 0])[:, :, None]


def added(streams: Array, value: Array) -> Array:
    """Return the streams [b, s, n, d] with a value [b, s, d] added to all but the first."""
    return jnp.concatenate([streams[:, :, :1], streams[:, :, 1:] + value[:, :, None]], axis=2)


def _factors(logits: Array, weight: Array) -> Array:
    """Return tanh(logits) [b, s, n] times a weight [m, n], as [b, s, m] in float32."""
    routed = jnp.tanh(logits.astype(jnp.float32))
    wide = lax.broadcast_to_rank(weight.astype(jnp.float32), 4)
    return jnp.sum(routed[:, :, None] * wide, axis=-1)


def _as_large(streams: Iterable[Array], like: Array) -> Iterator[Array]:
    """Yield streams [b, s, d] with the root mean square of `like` at each token."""
    size = jnp.sqrt(_mean_square(like))
    for stream in streams:
        yield stream * (size / jnp.sqrt(jnp.maximum(_mean_square(stream), 1e-5))).astype(stream.dtype)


def _mean_square(x: Array) -> Array:
    """Return the mean [b, s, 1] of the squares of x [b, s, d], in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
