"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), with an explicit backward.

JAX's own backward takes XLA:CPU seven times as long, mostly for an elementwise product summed over the last dim (JAX
0.10.2). Here that is an einsum, in two passes over the data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import Norm
from meshwright.execution.models.remat import INTERMEDIATE
from meshwright.execution.runtime.mesh import mesh_platform


def norm(x: Array, op: Norm, scale: Array | None, bias: Array | None = None) -> Array:
    """Normalize x [..., d] over its last dim (or dims: `op.dims`), in float32; the result has the dtype of x."""
    if scale is None:
        scale = jnp.ones(op.size, x.dtype)
    if op.factor != 1.0 or (op.offset and op.kind == "layer"):
        scale = (scale.astype(jnp.float32) + op.offset) * op.factor
        op = replace(op, offset=0.0, factor=1.0)
    if op.dims:
        if any(jax.typeof(x).sharding.spec[1 - len(op.dims) :]):
            # These dims cannot be merged, because one after the first is sharded.
            axes, wide = tuple(range(-len(op.dims), 0)), x.astype(jnp.float32)
            if op.kind == "layer":
                wide -= jnp.mean(wide, axis=axes, keepdims=True)
            inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + op.epsilon)
            normed = _scaled(wide * inverse, scale, op.offset)
            return (normed if bias is None else normed + _float32_per_token(bias, x)).astype(x.dtype)
        flat = x.reshape(*x.shape[: -len(op.dims)], op.size)
        return norm(flat, replace(op, dims=()), scale.reshape(-1), None if bias is None else bias.reshape(-1)).reshape(
            x.shape
        )
    if op.kind == "layer":
        moved: Any = _layer_norm(op.epsilon, x, scale, jnp.zeros_like(scale) if bias is None else bias)
        return moved
    normed: Any = _rms_norm(op.epsilon, op.offset, x, scale)
    return normed if bias is None else normed + lax.broadcast_to_rank(bias.astype(x.dtype), x.ndim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(epsilon: float, offset: float, x: Array, scale: Array) -> Array:
    return _rms_forward(epsilon, offset, x, scale)[0]


def _rms_forward(epsilon: float, offset: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    if jax.typeof(x).sharding.spec[-1]:
        # Saved with the inputs of matmuls, so that backward does not all-reduce squares again.
        inverse = checkpoint_name(inverse, INTERMEDIATE)
    return _scaled(wide * inverse, scale, offset).astype(x.dtype), (x, scale, inverse)


def _rms_backward(_: float, offset: float, kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, scale, inverse = kept
    normal, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    of_normal = _scaled(gradient, scale, offset)
    of_x = inverse * (of_normal - normal * _mean_product(of_normal, normal))
    return of_x.astype(x.dtype), _sum_of_tokens(gradient * normal).astype(scale.dtype)


_rms_norm.defvjp(_rms_forward, _rms_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(epsilon: float, x: Array, scale: Array, bias: Array) -> Array:
    return _layer_forward(epsilon, x, scale, bias)[0]


def _layer_forward(epsilon: float, x: Array, scale: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    return (centred * inverse * _float32_per_token(scale, x) + _float32_per_token(bias, x)).astype(x.dtype), (
        x,
        scale,
        bias,
        mean,
        inverse,
    )


def _layer_backward(_: float, kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    x, scale, bias, mean, inverse = kept
    normal, gradient = (x.astype(jnp.float32) - mean) * inverse, gradient.astype(jnp.float32)
    of_normal = gradient * _float32_per_token(scale, x)
    centred = of_normal - jnp.mean(of_normal, axis=-1, keepdims=True)
    of_x = inverse * (centred - normal * _mean_product(of_normal, normal))
    of_scale, of_bias = _sum_of_tokens(gradient * normal), _sum_of_tokens(gradient)
    return of_x.astype(x.dtype), of_scale.astype(scale.dtype), of_bias.astype(bias.dtype)


_layer_norm.defvjp(_layer_forward, _layer_backward)


def _scaled(x: Array, scale: Array, offset: float) -> Array:
    """Return x [..., d] * (scale + offset) in float32.

    XLA:TPU runs a sum of vectors [d] as an op of its own, which takes a microsecond for each norm (libtpu 0.0.42.1); on
    GPUs two products with x would be one kernel more.
    """
    by = _float32_per_token(scale, x)
    if offset and mesh_platform() == "tpu":
        return x * by + offset * x
    return x * (by + offset if offset else by)


def _float32_per_token(vector: Array, x: Array) -> Array:
    """Cast a scale or bias, with the shape of the normalized dims, to float32 and broadcast it to the rank of x."""
    return lax.broadcast_to_rank(vector.astype(jnp.float32), x.ndim)


def _mean_product(left: Array, right: Array) -> Array:
    """Return the mean of left * right over the last dim (kept as size 1), also if the dim is sharded."""
    *others, last = jax.typeof(left).sharding.spec
    whole = P(*others) if last else None
    return jnp.einsum("...d,...d->...", left, right, out_sharding=whole)[..., None] / left.shape[-1]


def _sum_of_tokens(x: Array) -> Array:
    """Sum x [..., d] over all dims but the last."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))
