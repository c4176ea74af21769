"""Lower the engine's step for a serving plan, on a mesh whose devices need not be present."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.families.registry import serving_from_data
from meshwright.description.step.parameter_tree import is_adapter, map_leaves
from meshwright.description.step.serve import page_parts, table_entries
from meshwright.description.step.serving import NARROW, CacheSplit, Serving, ServingLayout, check_serving
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.delta_state import abstract_states
from meshwright.execution.models.generation.generate import decode_layout
from meshwright.execution.models.generation.paged_cache import PAGE_DTYPES, abstract_pages, page_axes
from meshwright.execution.models.generation.serving_step import abstract_stored, check_served, dtype_of
from meshwright.execution.models.generation.stationary import for_server_products
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.mesh import MeshShape
from meshwright.serving.engine.programs import Shape, greedy_program


def lower_engine_step(mesh: Mesh, *, serving: dict[str, Any], cache: CacheSplit) -> jax.stages.Lowered:
    """Lower an engine's greedy step for a serving plan.

    In decode, each row has one token; in chunked prefill, a chunk of its prompt. Page tables and pages have the size
    that the longest sequences need.

    Args:
        mesh: the mesh, whose devices may be abstract.
        serving: the plan's `Serving`, as `dataclasses.asdict` writes it.
        cache: how the cache is split over devices in addition to heads.
    """
    read, shape = serving_from_data(serving), MeshShape(**mesh.shape)
    layout = ServingLayout(shape, cache)
    check_engine_step(read, layout)
    assert read.batch is not None
    model, context, parts = read.model, decode_layout(read.model, shape, cache), page_parts(read.model, layout)
    entries = table_entries(read, parts)
    program = Shape(read.batch, read.step_length, entries)
    counts = tuple(read.batch // shape.degree(page_axes(context, model)) * count for count in entries)
    dtype = DTYPES[dtype_of("compute_dtype", read.compute_dtype)]
    with jax.set_mesh(mesh):
        stored = PAGE_DTYPES.get(read.kv_dtype, dtype)
        pages: Any = abstract_pages(model, context, counts, read.page_size * parts, stored)
        pages = (*pages, *abstract_states(model, context, read.batch, dtype))
        pages = jax.tree.map(lambda leaf: leaf.update(sharding=NamedSharding(mesh, leaf.sharding.spec)), pages)
        params = map_leaves(
            lambda path, leaf: leaf.update(dtype=dtype) if is_adapter(path) else leaf,
            abstract_stored(read, mesh, context),
        )
        params = for_server_products(params, model)
        last, packed = (
            jax.ShapeDtypeStruct(size, jnp.int32, sharding=NamedSharding(mesh, P()))
            for size in ((read.batch,), (read.batch, program.columns.width))
        )
        return greedy_program(model, shape, cache, program, dtype).lower(params, pages, last, packed, None)


def check_engine_step(serving: Serving, layout: ServingLayout) -> None:
    """Raise a `MeshwrightError` if an engine cannot run the step of a serving plan."""
    check_serving(serving, layout)
    is_narrow = serving.kv_dtype in NARROW["kv_dtype"]
    check_served(replace(serving, kv_dtype=serving.compute_dtype) if is_narrow else serving, layout.mesh)
    context = decode_layout(serving.model, layout.mesh, layout.cache)
    shards = layout.mesh.degree(page_axes(context, serving.model))
    if serving.batch is not None and serving.batch % shards:
        raise MeshwrightError(
            f"batch is {serving.batch}, and {shards} groups of devices have rows of their own on {layout}; use a"
            f" multiple of {shards}"
        )
