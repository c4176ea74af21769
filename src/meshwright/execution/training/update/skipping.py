"""Skip a bad step: inside the compiled step, the state stays as it was."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array

NORM_LIMIT = "norm_limit"
"""Name of the batch entry with the maximum norm of the gradients, one float32."""


def is_bad(loss: Array, norm: Array, limit: Array) -> Array:
    """Whether to skip a step, as a boolean scalar: loss or norm is not finite, or the norm exceeds the limit."""
    return ~(jax.numpy.isfinite(loss) & jax.numpy.isfinite(norm) & (norm <= limit))


def unless(bad: Array, before: Any, after: Any) -> Any:
    """Return the state after a step, or before it if the step is bad; the schedule's step count always advances."""
    return jax.tree.map(
        lambda old, new: new if is_schedule(new) else jax.lax.select(bad, old, new),
        before,
        after,
        is_leaf=is_schedule,
    )


def is_schedule(node: Any) -> bool:
    """Whether a part of an optimizer state is the count of steps that determines the learning rate."""
    return isinstance(node, optax.ScaleByScheduleState)
