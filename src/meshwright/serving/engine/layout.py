"""Layout of an engine on a mesh: rows, pages and step shapes, from the model, memory and settings."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.description.step.frequencies import DynamicRopeScaling
from meshwright.description.step.legality import check_runnable, learned_positions
from meshwright.description.step.rules import local_parameter_shape
from meshwright.description.step.serve import layers_by_window, pages_read
from meshwright.description.step.serving import CacheSplit, check_linear_serving, check_stored_dtypes, generation_rules
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.cache import split_axes
from meshwright.execution.models.generation.delta_state import abstract_states
from meshwright.execution.models.generation.generate import decode_layout, switching_length
from meshwright.execution.models.generation.paged_cache import PAGE_DTYPES, abstract_pages, page_axes
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.serving.engine.adapters import slot_parameters
from meshwright.serving.engine.settings import EngineLayout, EngineSettings
from meshwright.units import show_bytes

ROWS = 64
"""Default number of sequences generated at once."""

CONTEXT = 4096
"""Default maximum number of tokens of a sequence, if the model allows more."""

WIDTHS = 2
"""Number of page-table widths for which programs are compiled. Each width is a quarter of the next one."""

HALVINGS = 3
"""How often the number of rows is halved for decode programs: one for all rows, one for half of them, and so on."""

LEAST_WIDTH = 64
"""Minimum tokens of a page table: a narrower one saves too little time to compile another program."""

LEAST_CHUNK = 16
"""Minimum tokens of a prompt chunk: shorter chunks are hardly faster."""

SHARE_OF_FREE = 0.85
"""Fraction of the memory not used by parameters that is given to pages; the rest is for activations."""

SIMULATED_BYTES = 1 << 31
"""Maximum bytes of pages on simulated devices, all together."""


def engine_layout(model: LoadedModel, settings: EngineSettings) -> tuple[EngineLayout, ShardingContext]:
    """Return the layout of an engine, and the sharding context of its steps.

    Raises:
        MeshwrightError: the mesh cannot serve this model, or the settings do not fit the mesh, the model or memory.
    """
    config, mesh = model.config, model.mesh_shape
    check_runnable(config, mesh)
    check_linear_serving(config, mesh)
    check_stored_dtypes(model.system.chip, weight_dtype=settings.weight_dtype, kv_dtype=settings.kv_dtype)
    if settings.num_drafts and config.attention.linear is not None:
        raise MeshwrightError(
            f"num_drafts is {settings.num_drafts}; the state of {config.name}'s linear attention cannot go back before"
            f" a draft that was wrong: use num_drafts 0"
        )
    if mesh.pp > 1:
        raise MeshwrightError(f"mesh {mesh} has pp={mesh.pp}; a server has no pipeline, use pp=1 and more tp or dp")
    parts = mesh.degree(split_axes(decode_layout(config, mesh), config.attention.latent is not None))
    context = decode_layout(config, mesh, _split(settings.cache_split, parts, model))
    shards = mesh.degree(page_axes(context, config))
    rows = math.ceil((settings.rows or ROWS) / shards)
    page, windows = settings.page_size, tuple(layers_by_window(config))
    if context.cache_split == "sequence" and page % parts:
        raise MeshwrightError(f"page_size is {page}, which mesh {mesh} splits in {parts}; use a multiple of {parts}")
    longest = _context(model, settings)
    chunks = _chunks(settings.chunk_tokens, longest, shards)
    one = math.ceil(longest / page)  # Pages of the longest sequence.
    of_window = pages_read(windows, page, one, max(length for _, length in chunks))
    wanted = rows * one
    if settings.cache_tokens is not None:
        wanted = math.ceil(settings.cache_tokens / page / shards)
    fits = _affordable_pages(model, context, settings, one, of_window, rows * shards)
    if settings.cache_tokens is not None and fits < wanted:
        raise MeshwrightError(
            f"cache_tokens is {settings.cache_tokens}; there is memory for {fits * page * shards} beside the parameters"
        )
    if min(wanted, fits) < one:
        raise MeshwrightError(
            f"the cache has room for {min(wanted, fits) * page} tokens of a group of devices, and a text may have"
            f" {longest}; use a context of at most {min(wanted, fits) * page}, more cache_tokens, or a mesh with more"
            f" memory"
        )
    pages = tuple(
        min(wanted, fits) if w is None else max(own, math.ceil(min(wanted, fits) * own / one))
        for w, own in zip(windows, of_window, strict=True)
    )
    least = max(1, LEAST_WIDTH // page)
    widths = sorted({one, *(max(min(one, least), math.ceil(one / 4**n)) for n in range(1, WIDTHS))})
    scalings = config.rope_scalings
    layout = EngineLayout(
        context=longest,
        page_size=page,
        shards=shards,
        rows=rows,
        windows=windows,
        pages=pages,
        widths=tuple(widths),
        decoded=tuple(sorted({max(1, math.ceil(rows / 2**n)) for n in range(HALVINGS + 1)})),
        chunks=chunks,
        chunk_overhead=_ridge(model) * mesh.degree(context.rules["batch"]) / shards,
        num_drafts=settings.num_drafts,
        # Pages do not have the state of linear attention at the end of a prefix.
        prefix_cache=settings.prefix_cache and config.attention.linear is None,
        switch=switching_length(config),
        has_state=config.attention.linear is not None,
        stretched_from=next((s.original_max_seq_len for s in scalings if isinstance(s, DynamicRopeScaling)), None),
    )
    return layout, context


def _split(asked: CacheSplit | None, parts: int, model: LoadedModel) -> CacheSplit:
    """Return how the cache is split over devices in addition to heads, by default by rows.

    Args:
        asked: the setting `cache_split`.
        parts: number of parts into which rows or tokens of the cache can be split; 1 for no such split.
        model: the model and mesh, for errors.
    """
    if parts == 1:
        if asked in ("batch", "sequence"):
            raise MeshwrightError(
                f"mesh {model.mesh_shape} splits nothing of the cache by {asked}; leave cache_split out"
            )
        return "heads"
    return asked or "batch"


def _context(model: LoadedModel, settings: EngineSettings) -> int:
    """Return the maximum number of tokens of a sequence, including its prompt."""
    learned = learned_positions(model.config)
    most = min(model.seq_len or CONTEXT, learned or model.seq_len or CONTEXT)
    if settings.context is None:
        return min(most, CONTEXT)
    if learned is not None and settings.context > learned:
        raise MeshwrightError(
            f"context is {settings.context}, more than the {learned} positions that {model.config.name} has learned"
        )
    return settings.context


def _chunks(tokens: int, context: int, shards: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of prompt chunks, (rows of each shard, tokens of each row).

    Each of up to three lengths comes with up to four row counts: all that `tokens` allows, a quarter, a sixteenth, one.

    Args:
        tokens: maximum number of tokens of a chunk, over all shards.
        context: maximum number of tokens of a sequence.
        shards: number of shards.
    """
    each = max(1, tokens // shards)
    longest = min(each, 1 << (context - 1).bit_length())
    lengths = [longest >> shift for shift in (0, 2, 4) if longest >> shift >= min(longest, LEAST_CHUNK)]
    shapes = ((max(1, each // length >> shift), length) for length in lengths for shift in (0, 2, 4, each.bit_length()))
    return tuple(dict.fromkeys(shapes))


def stored_dtype(model: LoadedModel, settings: EngineSettings) -> Any:
    """Return the dtype in which pages store keys and values."""
    return PAGE_DTYPES[settings.kv_dtype] if settings.kv_dtype else DTYPES[model.dtype]


def adapter_bytes(model: LoadedModel, settings: EngineSettings) -> int:
    """Return the bytes of all adapter slots on one device."""
    config = settings.with_slots(model.config)
    mesh, itemsize = model.mesh_shape, np.dtype(DTYPES[model.dtype]).itemsize
    return itemsize * sum(
        math.prod(local_parameter_shape(parameter, mesh=mesh, rules=generation_rules(config, mesh), what=path))
        for path, parameter in slot_parameters(config, mesh)
    )


def _ridge(model: LoadedModel) -> float:
    """Return the tokens per step for which matmuls (2 flops per parameter, token) take as long as reading weights."""
    itemsize = np.dtype(DTYPES[model.dtype]).itemsize
    return model.system.peak(model.dtype) * itemsize / (2 * model.system.hbm_bytes_per_second)


def _affordable_pages(
    model: LoadedModel,
    context: ShardingContext,
    settings: EngineSettings,
    one: int,
    of_window: tuple[int, ...],
    num_rows: int,
) -> int:
    """Return how many pages for layers without a window fit in the memory of a shard, beside those with a window.

    Args:
        model: the model, whose parameters are on the devices.
        one: number of pages of the longest sequence, for layers without a window.
        of_window: for each attention window, the maximum number of pages of one sequence that a step reads.
        num_rows: rows of all shards; each row has a state of linear attention, if the model has any.

    Raises:
        MeshwrightError: not even the longest sequence fits.
    """
    with jax.set_mesh(model.mesh):
        states = abstract_states(model.config, context, num_rows, DTYPES[model.dtype])
        single = abstract_pages(
            model.config, context, (1,) * len(of_window), settings.page_size, stored_dtype(model, settings)
        )
    state_bytes = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(states)
    )
    # Layers with a window have fewer pages than those without.
    page_bytes = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * own / one
        for own, pages in zip(of_window, single, strict=True)
        for leaf in jax.tree.leaves(pages)
    )
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        slots = adapter_bytes(model, settings)
        free = SHARE_OF_FREE * (stats["bytes_limit"] - stats["bytes_in_use"] - slots)
    else:
        free = SIMULATED_BYTES / jax.device_count()
    fits = int(max(0.0, free - state_bytes) / page_bytes)
    if jax.process_count() > 1:
        # All processes have the same number of pages: the number that fits on the fullest device.
        fits = int(multihost_utils.process_allgather(np.int32(min(fits, 2**31 - 1))).min())
    if fits < one:
        raise MeshwrightError(
            f"a text of {one * settings.page_size} tokens keeps {show_bytes(one * page_bytes)} on a device, of which"
            f" {show_bytes(free)} are free; use a smaller context, kv_dtype int8 or fp8, or a mesh that splits more"
        )
    return fits
