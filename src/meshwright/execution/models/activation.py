"""The activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax import Array, lax

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
        first = _above_cutoff(first, op.sparsity)
    made = FUNCTIONS[op.function](first)
    return made * rest[0] if rest else made


def _above_cutoff(gates: Array, share: float) -> Array:
    """Return the gates [b, s, f] minus a cutoff, those below it as zeros.

    It is the number that this share of normally distributed gates with their mean and deviation would be below.
    """
    wide, count = gates.astype(jnp.float32), gates.shape[-1]
    mean = jnp.sum(wide, axis=-1) / count
    # By way of the mean the variance has no gradient.
    variance = jnp.sum(jnp.square(wide - lax.stop_gradient(mean)[..., None]), axis=-1) / count
    cutoff = mean + NormalDist().inv_cdf(share) * jnp.sqrt(jnp.maximum(variance, 1e-12))
    return jax.nn.relu(wide - cutoff[..., None]).astype(gates.dtype)
