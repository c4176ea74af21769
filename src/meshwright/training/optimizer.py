"""The optimizers that a strategy names, through Optax: how gradients, which are clipped before, change parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields
from meshwright.runtime import DTYPES
from meshwright.step import DEFAULT, Dtype, Strategy
from meshwright.step.parameter_tree import CHOICE_BIAS


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Clipped gradients, a linear warm-up and a cosine decay to a tenth; which optimizer is the strategy's to say.

    AdamW (arXiv:1711.05101), Lion (arXiv:2302.06675), Adafactor (arXiv:1804.04235) without momentum, or plain SGD; b1,
    b2 and the decay of weights are for those that have them.
    """

    learning_rate: float = 3e-3
    warmup_steps: int = 20
    decay_steps: int = 200
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learning_rate <= 0:
            raise MeshwrightError(f"learning_rate is {self.learning_rate}; it is a number above 0, as 0.003")
        wrong = [name for name in ("warmup_steps", "weight_decay", "b1", "b2") if getattr(self, name) < 0]
        wrong += [name for name in ("b1", "b2") if getattr(self, name) >= 1]
        wrong += [name for name in ("decay_steps", "clip_norm") if getattr(self, name) <= 0]
        if wrong:
            raise MeshwrightError(f"the optimizer has {wrong[0]}={getattr(self, wrong[0])}, which it cannot step by")

    def schedule(self) -> optax.Schedule:
        """The learning rate at each step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=self.end,
            end_value=self.learning_rate / 10,
        )

    @property
    def end(self) -> int:
        """The step at which the schedule reaches its last rate, a tenth of the highest."""
        return max(self.decay_steps, self.warmup_steps + 1)

    def rate(self, step: int) -> float:
        """The learning rate at a step, as `schedule` has it, without JAX, whose devices may not be claimed yet."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        share = min(1.0, (step - self.warmup_steps) / (self.end - self.warmup_steps))
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    def build(self, strategy: Strategy = DEFAULT) -> optax.GradientTransformation:
        """The optax transformation, its moments in the strategy's dtype between steps; norm scales do not decay."""
        rate, decay = self.schedule(), self.weight_decay
        if strategy.optimizer == "adamw":
            made = optax.adamw(rate, self.b1, self.b2, weight_decay=decay, mask=_decays)
        elif strategy.optimizer == "lion":
            made = optax.lion(rate, self.b1, self.b2, weight_decay=decay, mask=_decays)
        elif strategy.optimizer == "adafactor":
            made = optax.adafactor(rate)
        elif strategy.optimizer == "sgd":
            made = optax.sgd(rate)
        else:
            raise MeshwrightError(f"optimizer {strategy.optimizer} can be planned, but is none that runs yet")
        made = _with_standard_promotion(made)
        return made if strategy.moment_dtype is None else _moments_in(made, strategy.moment_dtype)


def _decays(params: Any) -> Any:
    """True for every parameter that weight decay pulls to zero; a bias that has no gradient stays as it is."""

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return "norm" not in name and CHOICE_BIAS not in name

    return jax.tree.map_with_path(decays, params)


def _with_standard_promotion(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation, whatever JAX is told of mixed dtypes: Optax raises a float decay to an integer count."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _moments_in(transformation: optax.GradientTransformation, dtype: Dtype) -> optax.GradientTransformation:
    """The transformation, the arrays that it keeps narrowed between steps; each step is made in their own dtype."""

    def narrow(state: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(DTYPES[dtype]) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state
        )

    def init(params: Any) -> Any:
        return narrow(transformation.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        own = jax.eval_shape(transformation.init, params)
        updates, state = transformation.update(
            updates, jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), state, own), params
        )
        return updates, narrow(state)

    return optax.GradientTransformation(init, update)
