"""Input of a pipeline's first stage: the embeddings of a microbatch, which all stages compute together.

Each stage computes all sequences of the microbatch, or a share of them that is gathered for the first stage.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.execution.runtime.shards import STAGES


def inject_on_first_stage(x: Array, arriving: Array) -> Array:
    """Return the input of each stage [p, b, ...]: x [b, ...] on the first stage, `arriving` [p, b, ...] on the others.

    The first dim of x may be sharded over stages; it is then gathered, and in backward each stage receives only its
    share of the gradient of x, by a reduce-scatter.
    """
    spec = jax.typeof(arriving).sharding.spec
    if STAGES not in _axes(jax.typeof(x).sharding.spec[0]):
        is_first = jnp.arange(arriving.shape[0], out_sharding=P(STAGES)) == 0
        return jnp.where(is_first.reshape(-1, *(1,) * x.ndim), x[None], arriving)

    def local(x: Array, arriving: Array) -> Array:
        whole = lax.all_gather(x, STAGES, tiled=True)
        return jnp.where(lax.axis_index(STAGES) == 0, whole[None], arriving)

    return jax.shard_map(local, in_specs=(jax.typeof(x).sharding.spec, spec), out_specs=spec)(x, arriving)


def zeros_on_stages(like: Any, stages: int) -> Array:
    """Return zeros [p, b, ...], one array like `like` [b, ...] for each stage; b is not sharded over stages."""
    split, *others = like.sharding.spec
    whole = tuple(axis for axis in _axes(split) if axis != STAGES)
    return jnp.zeros((stages, *like.shape), like.dtype, out_sharding=P(STAGES, whole or None, *others))


def _axes(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else dim or ()
