"""The activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.layer import Activation, Gated

FUNCTIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(op: Gated, *sources: Array) -> Array:
    """Compute function(gate) * up, or function(source) of a single source; `op.clamped` replaces the formula."""
    first, *rest = sources
    if op.clamped:
        limit = op.clamped.limit
        gate, up = jnp.minimum(first, limit), jnp.clip(rest[0], -limit, limit)
        return gate * jax.nn.sigmoid(op.clamped.alpha * gate) * (up + 1)
    made = FUNCTIONS[op.function](first)
    return made * rest[0] if rest else made
