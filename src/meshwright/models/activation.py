"""The activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
from jax import Array

from meshwright.step.layer import Activation, Gated

FUNCTIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def activate(op: Gated, *sources: Array) -> Array:
    """function(gate) * up, or function(source) of one source."""
    first, *rest = sources
    made = FUNCTIONS[op.function](first)
    return made * rest[0] if rest else made
