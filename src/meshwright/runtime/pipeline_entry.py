"""How a microbatch enters the stages of a pipeline: on the first, whole, where all stages made it or each a share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.runtime.shards import STAGES


def on_first(x: Array, arriving: Array) -> Array:
    """What arrived at each stage [p, b, ...], but on the first x [b, ...], whose first dim the stages may split.

    Of x split so each stage gets the gradient of its share alone, by a reduce-scatter.
    """
    spec = jax.typeof(arriving).sharding.spec
    if not _is_split(x):
        is_first = jnp.arange(arriving.shape[0], out_sharding=P(STAGES)) == 0
        return jnp.where(is_first.reshape(-1, *(1,) * x.ndim), x[None], arriving)

    def local(x: Array, arriving: Array) -> Array:
        whole = lax.all_gather(x, STAGES, tiled=True)
        return jnp.where(lax.axis_index(STAGES) == 0, whole[None], arriving)

    return jax.shard_map(local, in_specs=(jax.typeof(x).sharding.spec, spec), out_specs=spec)(x, arriving)


def nothing_on(like: Any, stages: int) -> Array:
    """Zeros [p, b, ...] for each stage like an array [b, ...], whose first dim the stages may split."""
    split, *others = like.sharding.spec
    whole = tuple(axis for axis in _axes(split) if axis != STAGES)
    return jnp.zeros((stages, *like.shape), like.dtype, out_sharding=P(STAGES, whole or None, *others))


def _is_split(x: Array) -> bool:
    """Whether each stage has a share of the first dim."""
    return STAGES in _axes(jax.typeof(x).sharding.spec[0])


def _axes(dim: Any) -> tuple[str, ...]:
    """The mesh axes that split a dim, as its part of a spec has them."""
    return (dim,) if isinstance(dim, str) else dim or ()
