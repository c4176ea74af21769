"""The steps of serving plans, lowered for meshes whose devices need not be there: those that `generation` runs."""

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
from meshwright.models.generation import decode_layout, programs, prompt_layout, prompt_parts
from meshwright.models.sampling import Samplers, Written, likeliest_of
from meshwright.runtime import DTYPES, ShardingContext, abstract
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
    read, shape, rows, layout = _read(mesh, serving, cache)
    dtype = DTYPES[_dtype("compute_dtype", read.compute_dtype)]
    with jax.set_mesh(mesh):
        caches = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)),
            abstract_caches(read.model, layout, rows, read.context, dtype, unit=read.page_size),
        )
        tokens = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(mesh, layout.spec("batch")))
        program = programs(read.model, shape, cache, rows, read.context, dtype).decode
        params, positions, number, samplers = _arguments(mesh, read, layout, rows)
        return program.lower(params, tokens, caches, positions, samplers, Written(), number)


def lower_prefill_step(mesh: Mesh, *, serving: dict[str, Any], cache: CacheSplit) -> jax.stages.Lowered:
    """The step that reads whole prompts, all as long, into a new cache, and gives the likeliest token after each."""
    read, shape, rows, _ = _read(mesh, serving, cache)
    layout, dtype = prompt_layout(read.model, shape, cache), DTYPES[_dtype("compute_dtype", read.compute_dtype)]
    parts = prompt_parts(layout)
    if read.prompt_len % parts:
        raise MeshwrightError(
            f"prompt_len is {read.prompt_len}, which mesh {shape} splits in {parts}; use a multiple of {parts}"
        )
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
        tokens = jax.ShapeDtypeStruct((rows, read.prompt_len), jnp.int32, sharding=sharding)
        program = programs(read.model, shape, cache, rows, read.context, dtype).prefill
        params, lengths, number, samplers = _arguments(mesh, read, layout, rows)
        return program.lower(params, tokens, lengths, samplers, Written(), number)


def _read(mesh: Mesh, serving: dict[str, Any], cache: CacheSplit) -> tuple[Serving, MeshShape, int, ShardingContext]:
    """What is served, its mesh and rows, and how decoding is sharded."""
    read, shape = serving_from_data(serving), MeshShape(**mesh.shape)
    check_serving(read, ServingLayout(shape, cache))
    check_served(read, shape)
    assert read.batch is not None
    return read, shape, read.batch, decode_layout(read.model, shape, cache)


def _arguments(
    mesh: Mesh, read: Serving, layout: ShardingContext, rows: int
) -> tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, Samplers]:
    """Abstract parameters, a number of each row, a number, and samplers of the likeliest."""
    whole = NamedSharding(mesh, P())
    row_numbers, number = (jax.ShapeDtypeStruct(size, jnp.int32, sharding=whole) for size in ((rows,), ()))
    seeds: Any = jax.ShapeDtypeStruct((rows,), jnp.uint32, sharding=whole)
    params = abstract(parameters(read.model), mesh, layout, _dtype("weight_dtype", read.weight_dtype))
    return params, row_numbers, number, likeliest_of(seeds)
