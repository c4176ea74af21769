"""Typed random keys in a state. Checkpoints and other processes get their data: integer arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding


def is_key(leaf: Any) -> bool:
    """Whether an array has typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(keys: Any) -> Any:
    """Return the data of random keys, or its shape and sharding if they are abstract."""
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    data, place = jax.eval_shape(jax.random.key_data, keys), keys.sharding
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(place.mesh, place.spec))


def keys_from(data: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Return typed random keys made of their data. wanted: abstract keys, with the generator and the sharding."""
    generators: list[Any] = []
    jax.eval_shape(lambda keys: generators.append(jax.random.key_impl(keys)), wanted)
    return jax.device_put(jax.random.wrap_key_data(data, impl=generators[0]), wanted.sharding)
