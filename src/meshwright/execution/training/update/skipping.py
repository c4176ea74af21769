"""Skip a bad step inside the compiled step: return the state from before it."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array

NORM_LIMIT = "norm_limit"
"""Name of the batch entry with the maximum norm of the step's gradients, a float32 scalar."""


def is_bad(loss: Array, norm: Array, limit: Array) -> Array:
    """Whether to skip a step, as a boolean scalar: loss or norm is not finite, or the norm exceeds the limit."""
    return ~(jax.numpy.isfinite(loss) & jax.numpy.isfinite(norm) & (norm <= limit))


def unless(bad: Array, before: Any, after: Any) -> Any:
    """Return the state `after` a step, or the one `before` it if `bad`. The schedule's step count always advances."""
    return jax.tree.map(
        lambda old, new: new if is_schedule(new) else jax.lax.select(bad, old, new),
        before,
        after,
        is_leaf=is_schedule,
    )


def is_schedule(node: Any) -> bool:
    """Whether a node of an optimizer state is the count of steps that determines the learning rate."""
    return isinstance(node, optax.ScaleByScheduleState)
