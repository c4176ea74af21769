"""The decode step of a serving plan, lowered for a mesh whose devices need not be there: the one `generation` runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.families import serving_from_data
from meshwright.mesh import MeshShape
from meshwright.models.cache import abstract_caches
from meshwright.models.generation import decode_layout, programs
from meshwright.models.sampling import Samplers
from meshwright.runtime import DTYPES, abstract
from meshwright.step import CacheSplit, Dtype, Serving, ServingLayout, check_runnable, check_serving, parameters


def check_served(serving: Serving, mesh: MeshShape) -> None:
    """Raise where generation does not run what a serving plan says."""
    for name in ("weight_dtype", "kv_dtype", "compute_dtype"):
        _dtype(name, getattr(serving, name))
    if serving.kv_dtype != serving.compute_dtype:
        raise MeshwrightError(
            f"kv_dtype is {serving.kv_dtype}; generate keeps keys and values in the dtype of products,"
            f" {serving.compute_dtype}"
        )
    check_runnable(serving.model, mesh)


def _dtype(name: str, value: str) -> Dtype:
    """A dtype that generation runs in."""
    for known in DTYPES:
        if value == known:
            return known
    raise MeshwrightError(f"{name} is {value}, in which generate does not run; verify {' or '.join(DTYPES)}")


def lower_decode_step(mesh: Mesh, *, serving: dict[str, Any], cache: CacheSplit) -> jax.stages.Lowered:
    """The step that decodes one token of every sequence, the likeliest; serving as `dataclasses.asdict` has it.

    The cache has room for sequences as long as they get, in whole pages.
    """
    read, shape = serving_from_data(serving), MeshShape(**mesh.shape)
    check_serving(read, ServingLayout(shape, cache))
    check_served(read, shape)
    assert read.batch is not None
    model, layout = read.model, decode_layout(read.model, shape, cache)
    dtype = DTYPES[_dtype("compute_dtype", read.compute_dtype)]
    with jax.set_mesh(mesh):
        rows, whole = NamedSharding(mesh, layout.spec("batch")), NamedSharding(mesh, P())
        caches = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)),
            abstract_caches(model, layout, read.batch, read.context, dtype, unit=read.page_size),
        )
        params = abstract(parameters(model), mesh, layout, _dtype("weight_dtype", read.weight_dtype))
        tokens, positions, number = (
            jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding)
            for size, sharding in (((read.batch,), rows), ((read.batch,), whole), ((), whole))
        )
        seeds: Any = jax.ShapeDtypeStruct((read.batch,), jnp.uint32, sharding=whole)
        samplers = Samplers(None, None, None, None, None, seeds)
        program = programs(model, shape, cache, read.batch, read.context, dtype).decode
        return program.lower(params, tokens, caches, positions, samplers, None, number)
