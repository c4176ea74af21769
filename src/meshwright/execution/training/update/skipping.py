"""A step that is left out: inside the compiled step the state stays as it was."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array

NORM_LIMIT = "norm_limit"
"""The part of a batch that has the most that the norm of the gradients may be, one float32."""


def is_bad(loss: Array, norm: Array, limit: Array) -> Array:
    """Whether a step is to be left out, as a boolean scalar."""
    return ~(jax.numpy.isfinite(loss) & jax.numpy.isfinite(norm) & (norm <= limit))


def unless(bad: Array, before: Any, after: Any) -> Any:
    """Return the state after a step, or the state before if it is bad; the learning-rate schedule advances."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda old, new: new if is_schedule(new) else jax.lax.select(bad, old, new),
        before,
        after,
        is_leaf=is_schedule,
    )
