"""The activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.layer import Activation, ClampedSwiglu, Gated

FUNCTIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(op: Gated, *sources: Array) -> Array:
    """Return function(gate) * up for sources (gate, up), or function(source) for one; `ClampedSwiglu` clamps both.

    A clamped SwiGLU is gate * sigmoid(alpha * gate) * (up + 1).
    """
    first, *rest = sources
    if isinstance(op.function, ClampedSwiglu):
        limit = op.function.limit
        gate, up = jnp.minimum(first, limit), jnp.clip(rest[0], -limit, limit)
        return gate * jax.nn.sigmoid(op.function.alpha * gate) * (up + 1)
    if op.sparsity:
        first = jax.nn.relu(first - _cutoff(first, op.sparsity))
    made = FUNCTIONS[op.function](first)
    return made * rest[0] if rest else made


def _cutoff(gates: Array, share: float) -> Array:
    """Return the number [b, s, 1] below which this share of a token's gates [b, s, f] are, if normally distributed."""
    wide = gates.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True))
    return (mean + NormalDist().inv_cdf(share) * deviation).astype(gates.dtype)
