"""Muon: orthogonalised momentum for the matrices within layers, AdamW for all other parameters.

`step.passes.muon` determines which parameters are matrices, and describes the collectives that distribute them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from meshwright.description.step.parameter_tree import Parameter
from meshwright.description.step.passes.muon import COEFFICIENTS, ITERATIONS, RMS, matrices, matrix_of
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import LAYOUT


class MuonState(NamedTuple):
    """The optimizer state."""

    count: Array  # Number of steps.
    mu: Any  # First moments of all parameters.
    nu: Any  # Second moments of parameters that are not matrices.


def scale_by_muon(optimizer: Optimizer, workload: Workload, layout: ShardingContext) -> optax.GradientTransformation:
    """Return Muon as an Optax transformation of gradients, without weight decay and learning rate.

    It is github.com/KellerJordan/Muon with the scale of arXiv:2502.16982 and Nesterov momentum, like
    `optax.contrib.scale_by_muon`. Matmuls use the workload's compute dtype.
    """
    declared = matrices(workload)
    dtype = DTYPES[workload.compute_dtype]

    def matrix(path: Any) -> Parameter | None:
        """Return the declaration of a parameter that is a matrix or a stack of matrices; None for any other."""
        return declared.get(".".join(str(getattr(key, "key", key)) for key in path))

    def init(params: Any) -> MuonState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        nu = jax.tree.map_with_path(lambda path, zero: optax.MaskedNode() if matrix(path) else zero, zeros)
        return MuonState(jnp.zeros([], jnp.int32), zeros, nu)

    def first(path: Any, gradient: Array, mu: Array) -> Array:
        kept = optimizer.momentum if matrix(path) else optimizer.b1
        return kept * mu + (1 - kept) * gradient

    def second(gradient: Array, nu: Any) -> Any:
        if isinstance(nu, optax.MaskedNode):
            return nu
        return optimizer.b2 * nu + (1 - optimizer.b2) * jnp.square(gradient)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        count = state.count + 1
        mu = jax.tree.map_with_path(first, updates, state.mu)
        nu = jax.tree.map(second, updates, state.nu)

        def step(path: Any, gradient: Array, mu: Array, nu: Any) -> Array:
            if parameter := matrix(path):
                kept = optimizer.momentum
                ahead = kept * mu / _bias_correction(kept, count + 1) + (1 - kept) * gradient / _bias_correction(
                    kept, count
                )
                return orthogonalise(ahead, parameter, layout, dtype, eps=optimizer.eps)
            root = jnp.sqrt(nu / _bias_correction(optimizer.b2, count))
            return mu / _bias_correction(optimizer.b1, count) / (root + optimizer.eps)

        return jax.tree.map_with_path(step, updates, mu, nu), MuonState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _bias_correction(kept: float, count: Array) -> Array:
    """Return the bias correction 1 - kept**count of a moment that started at zero (arXiv:1412.6980, section 3)."""
    return 1 - kept**count


def orthogonalise(array: Array, parameter: Parameter, layout: ShardingContext, dtype: Any, *, eps: float) -> Array:
    """Return the matrices of a parameter, approximately orthogonalised, with root mean square `RMS`; sharding is kept.

    Each device receives the same number of whole matrices by all-to-all, and computes on them in `dtype`.

    Args:
        array: gradients or momentum of the parameter.
        dtype: dtype of the matmuls.
        eps: added to the norm of each matrix.
    """
    matrix = matrix_of(parameter)
    assert matrix is not None
    spec = jax.typeof(array).sharding.spec
    axes = [layout.axes(name) for name in parameter.axes]
    inner = axes[matrix.num_stacked :]
    live = [axis for axis in LAYOUT if layout.mesh.degrees[axis] > 1]
    copies = tuple(axis for axis in live if not any(axis in dim for dim in axes))
    degrees = layout.mesh.degrees
    num_copies = math.prod(degrees[axis] for axis in copies)
    devices = num_copies * math.prod(degrees[axis] for dim in inner for axis in dim)
    rows, columns = matrix.sizes(parameter.shape)

    def dealt(shard: Array) -> Array:
        stacked, rest = shard.shape[: matrix.num_stacked], shard.shape[matrix.num_stacked :]
        count = math.prod(stacked)
        x = shard.astype(dtype).reshape(count, *rest)
        x = jnp.pad(x, [(0, -count % devices), *[(0, 0)] * len(rest)])
        if copies:
            x = x.reshape(num_copies, -1, *rest)[jax.lax.axis_index(copies)]
        moves = [(at, dim) for at, dim in enumerate(inner, start=1) if dim]
        for at, dim in moves:
            x = jax.lax.all_to_all(x, dim, split_axis=0, concat_axis=at, tiled=True)
        whole = x.shape
        x = newton_schulz(x.reshape(-1, rows, columns), eps=eps).reshape(whole)
        for at, dim in reversed(moves):
            x = jax.lax.all_to_all(x, dim, split_axis=at, concat_axis=0, tiled=True)
        if copies:
            x = jax.lax.all_gather(x, copies, axis=0, tiled=True)
        return x[:count].reshape(*stacked, *rest)

    if live:
        dealt = jax.shard_map(dealt, in_specs=spec, out_specs=spec, check_vma=False)
    scale = RMS * math.sqrt(max(rows, columns))
    return scale * dealt(array).astype(array.dtype)


def newton_schulz(x: Array, *, eps: float) -> Array:
    """Return matrices [count, rows, columns] with all singular values moved close to 1, by Newton-Schulz iterations."""
    is_tall = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if is_tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    x = (x / (norm + eps).astype(x.dtype)).astype(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = jnp.einsum("kmn,kln->kml", x, x)
        x = a * x + jnp.einsum("kml,kln->kmn", b * gram + c * jnp.einsum("kml,klj->kmj", gram, gram), x)
    return jnp.swapaxes(x, 1, 2) if is_tall else x
