"""Speculative decoding with a draft model (arXiv:2211.17192): the programs of the draft model.

The draft model samples with the same random numbers as the served model, so that equal distributions give equal tokens.
A draft token is accepted if the served model chooses the same token, so the generated text is exactly the one that the
served model generates alone.

The draft model's keys and values have their own arrays of pages, with the same page numbers as the served model's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serve import layers_by_window
from meshwright.description.step.serving import CacheSplit
from meshwright.execution.models.ends import logits
from meshwright.execution.models.generation.generate import decode_layout
from meshwright.execution.models.generation.paged_cache import Pages
from meshwright.execution.models.generation.sampling import Written, choose, likeliest_of
from meshwright.mesh import MeshShape
from meshwright.serving.engine.programs import (
    Columns,
    Shape,
    compiler_options,
    samplers_at,
    through_pages,
    with_newest_tokens,
)


@lru_cache(maxsize=64)
def draft_prefill_program(
    model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, group: int, dtype: Any
) -> Any:
    """Return the draft model's jitted prefill: (params, pages, packed) -> pages. The pages are donated.

    Args:
        split: how the cache is split.
        group: index, in `Columns.tables` of the packed input, of the page table of layers without a window.
    """
    layout, columns = decode_layout(model, mesh, split), shape.columns

    def step(params: Any, pages: tuple[Pages, ...], packed: Array) -> tuple[Pages, ...]:
        own, tables = jax.reshard(packed, layout.spec("batch", "sequence")), (columns.tables[group],) * len(pages)
        return through_pages(params, pages, own[:, columns.tokens], own, tables, model, layout, dtype)[2]

    return jax.jit(step, donate_argnums=1, compiler_options=compiler_options())


@lru_cache(maxsize=64)
def draft_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, group: int, dtype: Any) -> Any:
    """Return the jitted drafting step: (params, pages, last, packed, samplers, seed) -> pages, drafts.

    Inputs: `last` is the newest token of every row of the engine; `samplers` and `seed` are those of `RowState`, or
    None if every row is greedy. The pages are donated. Results: the draft tokens [rows, length - 1]. All draft tokens
    are processed, even the last, because the next step needs its keys if it is accepted. Arguments are as in
    `draft_prefill_program`.
    """
    layout, columns = decode_layout(model, mesh, split), shape.columns

    def step(
        params: Any, pages: tuple[Pages, ...], last: Array, packed: Array, samplers: Array | None, seed: Array | None
    ) -> tuple[tuple[Pages, ...], Array]:
        own, tables = jax.reshard(packed, layout.spec("batch", "sequence")), (columns.tables[group],) * len(pages)
        token, drafts = with_newest_tokens(own[:, columns.tokens], last, own, layout)[:, :1], list[Array]()
        how = likeliest_of(jnp.zeros(shape.rows, jnp.uint32))
        if samplers is not None and seed is not None:
            # Drafts are sampled without penalties; this only lowers the number of accepted drafts.
            how = samplers_at(samplers, seed, packed[:, Columns.row])._replace(
                repetition_penalty=None, presence_penalty=None, frequency_penalty=None
            )
        for place in range(shape.length):
            x, table, pages = through_pages(params, pages, token, own, tables, model, layout, dtype, place)
            if place + 1 < shape.length:
                scores = logits(params, x, table, model, layout)[:, 0]
                drafts.append(jax.reshard(choose(scores, how, Written(), packed[:, Columns.drawn] + place), P()))
                token = jax.reshard(drafts[-1], layout.spec("batch"))[:, None]
        return pages, jnp.stack(drafts, axis=1)

    return jax.jit(step, donate_argnums=1, compiler_options=compiler_options())


def why_not_draft(draft: ModelConfig, served: ModelConfig, num_drafts: int) -> str:
    """Return why the model `draft` cannot draft `num_drafts` tokens per step for `served`; empty if it can."""
    if not num_drafts:
        return "num_drafts is 0; use 1 to 16"
    # `engine_layout` refuses drafts for a served model with linear attention.
    if draft.attention.linear is not None:
        return f"the state of {draft.name}'s linear attention cannot go back before a draft that was wrong"
    if draft.vocab != served.vocab:
        return f"it has a vocabulary of {draft.vocab}, and {served.name} one of {served.vocab}"
    if None not in layers_by_window(served):
        return f"{served.name} has no layer that attends to all keys, so that no page has all tokens of a text"
    return ""
