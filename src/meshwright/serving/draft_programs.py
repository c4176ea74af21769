"""A smaller model that guesses the next tokens, which the served one checks (arXiv:2211.17192).

It guesses with the random numbers that the served model will choose with, so that both take the same token where they
agree. A guess is kept where it is what the served model chooses: texts are those that it makes alone, token for token.

Its keys and values are in pages of their own under the numbers of the served model's pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.mesh import MeshShape
from meshwright.models.ends import logits
from meshwright.models.generation import decode_layout, through_cache
from meshwright.models.paged_cache import PagedCache, Pages
from meshwright.models.sampling import Written, choose, likeliest_of
from meshwright.serving.programs import FROM_LAST, Columns, Shape, samplers_at
from meshwright.step import CacheSplit, ModelConfig
from meshwright.step.serve import layers_by_window


@lru_cache(maxsize=64)
def read_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, group: int, dtype: Any) -> Any:
    """The step that reads what the served model reads: (params, pages, numbers) -> pages, which are donated.

    group: of the tables in a step's numbers, the one of all keys.
    """

    def step(params: Any, pages: tuple[Pages, ...], numbers: Array) -> tuple[Pages, ...]:
        tokens = numbers[:, shape.columns.tokens]
        return _through(params, pages, tokens, numbers, jnp.int32(0), model, mesh, split, shape, group, dtype)[2]

    return jax.jit(step, donate_argnums=1)


@lru_cache(maxsize=64)
def guess_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, group: int, dtype: Any) -> Any:
    """The step that guesses: (params, pages, last, numbers, samplers, seed) -> pages, tokens [rows, shape.length - 1].

    samplers, seed: of all rows of the engine, see `RowState`; None where every row takes the likeliest token. Each
    guess is read as well, also the last one, whose keys the next step needs if it is kept. pages are donated.
    """
    layout = decode_layout(model, mesh, split)

    def step(
        params: Any, pages: tuple[Pages, ...], last: Array, numbers: Array, samplers: Array | None, seed: Array | None
    ) -> tuple[tuple[Pages, ...], Array]:
        row, drawn = numbers[:, Columns.row], numbers[:, Columns.drawn]
        token = numbers[:, shape.columns.tokens][:, 0]
        token = jnp.where(token == FROM_LAST, last.at[row].get(mode="clip"), token)
        guesses = list[Array]()
        how = likeliest_of(jnp.zeros(shape.rows, jnp.uint32))
        if samplers is not None and seed is not None:
            # Penalties are left out: a guess need not be right.
            own = samplers_at(samplers, seed, row)
            how = own._replace(repetition_penalty=None, presence_penalty=None, frequency_penalty=None)
        for place in range(shape.length):
            x, table, pages = _through(
                *(params, pages, token[:, None], numbers, jnp.int32(place), model, mesh, split, shape, group, dtype)
            )
            if place + 1 < shape.length:
                scores = logits(params, x, table, model, layout)[:, 0]
                token = jax.reshard(choose(scores, how, Written(), drawn + place), P())
                guesses.append(token)
        return pages, jnp.stack(guesses, axis=1)

    return jax.jit(step, donate_argnums=1)


def _through(
    params: Any,
    pages: tuple[Pages, ...],
    tokens: Array,
    numbers: Array,
    place: Array,
    model: ModelConfig,
    mesh: MeshShape,
    split: CacheSplit,
    shape: Shape,
    group: int,
    dtype: Any,
) -> tuple[Array, Array, tuple[Pages, ...]]:
    """The residual stream of tokens [rows, s] from `place` in a step on, the table, and the pages with them."""
    layout = decode_layout(model, mesh, split)
    start, count = numbers[:, Columns.start], numbers[:, Columns.count]
    places = place + jnp.arange(tokens.shape[1])[None]
    positions = start[:, None] + jnp.minimum(places, jnp.maximum(count[:, None] - 1, 0))
    first, entries = shape.columns.tables[group]
    caches = tuple(PagedCache(own, numbers[:, entries], numbers[:, first], places < count[:, None]) for own in pages)
    spec = layout.spec("batch", "sequence")
    x, table, caches = through_cache(
        params,
        jax.reshard(tokens, spec),
        jax.reshard(positions, spec),
        caches,
        model,
        layout,
        dtype,
        lengths=jnp.maximum(positions + 1, numbers[:, Columns.read_length, None]),
    )
    return x, table, tuple(cache.pages for cache in caches)


def why_not_draft(draft: ModelConfig, served: ModelConfig) -> str:
    """Why a model cannot guess for another; empty where it can."""
    if draft.vocab != served.vocab:
        return f"it has a vocabulary of {draft.vocab}, and {served.name} one of {served.vocab}"
    if None not in layers_by_window(served):
        return f"{served.name} has no layer that attends to all keys, so that no page has all tokens of a text"
    return ""
