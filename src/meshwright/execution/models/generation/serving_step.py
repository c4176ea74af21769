"""Lower the prefill program of `generation` for meshes whose devices need not be present."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.families.registry import serving_from_data
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import parameters
from meshwright.description.step.serving import NARROW, SERVING_RULES, CacheSplit, Serving, ServingLayout, check_serving
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.generate import decode_layout, programs, prompt_layout, prompt_parts
from meshwright.execution.models.generation.sampling import Written, likeliest_of
from meshwright.execution.models.quantised.scaled import in_format
from meshwright.execution.runtime.arrays import DTYPES, abstract
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape


def check_served(serving: Serving, mesh: MeshShape) -> None:
    """Raise if no step can be compiled for a serving plan's dtypes, model or mesh."""
    for name in ("weight_dtype", "kv_dtype", "compute_dtype"):
        if name != "weight_dtype" or serving.weight_format is None:
            dtype_of(name, getattr(serving, name))
    if serving.kv_dtype != serving.compute_dtype:
        raise MeshwrightError(
            f"kv_dtype is {serving.kv_dtype}; verify keys and values in the dtype of products, {serving.compute_dtype},"
            f" or {' or '.join(NARROW['kv_dtype'])} of a step through pages (decode, or prefill with a chunk)"
        )
    if serving.model.lora is not None and not serving.is_paged:
        raise MeshwrightError(
            f"{serving.model.name} has adapter slots, and whole prompts are compiled without them; verify a chunk"
        )
    check_runnable(serving.model, mesh)


def dtype_of(name: str, value: str) -> Dtype:
    """Return the dtype `value` of a serving plan's field `name`. Raises if no step can be compiled in it."""
    for known in DTYPES:
        if value == known:
            return known
    more = f", or {' or '.join(NARROW[name])}" if name in NARROW else ""
    if name == "kv_dtype":
        more += " of a step through pages (decode, or prefill with a chunk)"
    raise MeshwrightError(f"{name} is {value}, in which no step is compiled; verify {' or '.join(DTYPES)}{more}")


def abstract_stored(serving: Serving, mesh: Mesh, layout: ShardingContext) -> Any:
    """Return a server's parameters as `jax.ShapeDtypeStruct`s, in the format of its weights. Call under `set_mesh`."""
    dtype = serving.weight_dtype if serving.weight_format is None else serving.compute_dtype
    declared = parameters(padded(serving.model, layout.mesh, SERVING_RULES))
    params = abstract(declared, mesh, layout, dtype_of("weight_dtype", dtype))
    if serving.weight_format is None:
        return params
    stored = in_format(params, serving.model, layout, serving.weight_dtype, serving.weight_format)
    return jax.tree.map(lambda leaf: leaf.update(sharding=NamedSharding(mesh, leaf.sharding.spec)), stored)


def lower_prefill_step(mesh: Mesh, *, serving: dict[str, Any], cache: CacheSplit) -> jax.stages.Lowered:
    """Lower the prefill of whole prompts of one length, which returns a new cache and each prompt's likeliest token.

    Args:
        serving: a `Serving` as plain data.
        cache: the dim of the cache that is split besides heads.

    Raises:
        MeshwrightError: the mesh does not divide the prompt length, or no step can be compiled (`check_served`).
    """
    read, shape = serving_from_data(serving), MeshShape(**mesh.shape)
    planned = ServingLayout(shape, cache)
    check_serving(read, planned)
    check_served(read, shape)
    assert read.batch is not None
    gathers = planned.gathers_weights(read)
    layout = prompt_layout(read.model, shape, cache, gathers_weights=gathers)
    dtype = DTYPES[dtype_of("compute_dtype", read.compute_dtype)]
    parts = prompt_parts(layout)
    if read.prompt_len % parts:
        raise MeshwrightError(
            f"prompt_len is {read.prompt_len}, which mesh {shape} splits in {parts}; use a multiple of {parts}"
        )
    with jax.set_mesh(mesh):
        sharding, whole = NamedSharding(mesh, layout.spec("batch", "sequence")), NamedSharding(mesh, P())
        tokens = jax.ShapeDtypeStruct((read.batch, read.prompt_len), jnp.int32, sharding=sharding)
        lengths = jax.ShapeDtypeStruct((read.batch,), jnp.int32, sharding=whole)
        seeds: Any = jax.ShapeDtypeStruct((read.batch,), jnp.uint32, sharding=whole)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        params = abstract_stored(read, mesh, decode_layout(read.model, shape, cache))
        program = programs(read.model, shape, cache, read.batch, read.context, dtype, gathers_weights=gathers).prefill
        return program.lower(params, tokens, lengths, likeliest_of(seeds), Written(), step)
