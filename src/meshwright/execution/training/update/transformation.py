"""The optimizer of a strategy as an Optax transformation of clipped gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Dtype, Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.update.muon import scale_by_muon
from meshwright.execution.training.update.optimizer import Optimizer


def transformation(
    optimizer: Optimizer, workload: Workload, layout: ShardingContext, strategy: Strategy = DEFAULT
) -> optax.GradientTransformation:
    """Return a strategy's optimizer as an Optax transformation. Moments are stored in the strategy's `moment_dtype`.

    Optimizers: AdamW (arXiv:1711.05101), Lion (arXiv:2302.06675), Adafactor (arXiv:1804.04235) without momentum, SGD
    without momentum, and Muon (`update.muon`), the only one that depends on the workload and on shardings.

    Raises:
        MeshwrightError: the optimizer can be planned but not run.
    """
    rate, decay = optimizer.optax_schedule(), optimizer.weight_decay

    def decays(params: Any) -> Any:
        return _by_path(optimizer.decays, params)

    if strategy.optimizer == "adamw":
        made = optax.adamw(rate, optimizer.b1, optimizer.b2, optimizer.eps, weight_decay=decay, mask=decays)
    elif strategy.optimizer == "lion":
        made = optax.lion(rate, optimizer.b1, optimizer.b2, weight_decay=decay, mask=decays)
    elif strategy.optimizer == "adafactor":
        made = optax.adafactor(rate)
    elif strategy.optimizer == "sgd":
        made = optax.sgd(rate)
    elif strategy.optimizer == "muon":
        made = optax.chain(
            scale_by_muon(optimizer, workload, layout),
            optax.add_decayed_weights(decay, decays),
            optax.scale_by_learning_rate(rate),
        )
    else:
        raise MeshwrightError(f"optimizer {strategy.optimizer} can be planned but not run yet")
    made = _with_standard_promotion(made)
    if optimizer.rates:
        made = _scaled(made, optimizer)
    return made if strategy.moment_dtype is None else _moments_in(made, strategy.moment_dtype)


def _by_path(function: Any, params: Any) -> Any:
    """Return a tree like the parameters, with the value of `function` for each path, such as `layers.query`."""
    return jax.tree.map_with_path(
        lambda path, _: function(".".join(str(getattr(key, "key", key)) for key in path)), params
    )


def _scaled(made: optax.GradientTransformation, optimizer: Optimizer) -> optax.GradientTransformation:
    """Return a transformation whose update of each parameter is multiplied by the parameter's factor (`rates`)."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = made.update(updates, state, params)
        return jax.tree.map(lambda array, factor: array * factor, updates, _by_path(optimizer.factor, updates)), state

    return optax.GradientTransformation(made.init, update)


def _with_standard_promotion(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation with standard dtype promotion, which Optax needs for float ** int (decay ** count)."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _moments_in(transformation: optax.GradientTransformation, dtype: Dtype) -> optax.GradientTransformation:
    """Return a transformation that stores its floating-point state in `dtype`, and computes in the original dtypes."""

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
