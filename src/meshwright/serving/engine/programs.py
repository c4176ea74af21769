"""The engine's device programs: process some tokens of some rows with the paged cache, and choose the next tokens.

Decode programs process, for each row, its newest token and the draft tokens after it. Programs of the same form process
chunks of prompts. The input of a step is packed into one array of integers (`Columns`), which one transfer sends to the
devices. Dims: rows of the step or, where named, of the engine; s tokens of each row; n chosen tokens of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Norm
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serving import CacheSplit
from meshwright.execution.models.ends import logits
from meshwright.execution.models.generation.delta_state import DeltaCache
from meshwright.execution.models.generation.generate import decode_layout, through_cache
from meshwright.execution.models.generation.paged_cache import PagedCache, Pages
from meshwright.execution.models.generation.sampling import Samplers, Written, choose, likeliest_of, with_chosen
from meshwright.execution.models.norm import norm
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape
from meshwright.serving.engine.request import MOST_LOGPROBS

CacheArrays = tuple[Any, ...]
"""The `Pages` of each window, and after them the `DeltaState` of linear attention, if the model has any."""

WORD = 32
"""Tokens per word of a token mask; the first token of a word is its lowest bit."""

FROM_LAST = -1
"""Token id in a step's input for the row's newest token, which is on the devices and not known to the host."""


@dataclass(frozen=True)
class Shape:
    """Shape of a step, over all shards."""

    rows: int
    length: int  # Tokens of each row.
    entries: tuple[int, ...]  # For each attention window, the entries of a row's page table.
    num_chosen: int = 1  # Maximum tokens chosen for each row: 1, or in a decode step with drafts `length`.

    @property
    def columns(self) -> Columns:
        """The columns of the packed input of a step of this shape."""
        return Columns(self)


class Columns:
    """Column indices and slices of the packed input of a step, int32 [rows, width].

    First come the columns below, then the tokens, then a page table for each attention window.

    Attributes:
        row: the row's number in the engine; for an unused row, the number of rows of the engine.
        start: position in its sequence of the row's first token.
        count: number of the row's tokens.
        is_chosen: whether a token is chosen after the row's last token.
        prefill_length: tokens at the sequence's last prefill, on which the rotary frequencies of some models depend.
        drawn: number of tokens chosen for the sequence before this step.
        slot: slot of the row's adapter, from 1; 0 for none.
        num_logprobs: 1 + the number of likeliest tokens to return with log probabilities per token; 0 for none at all.
        tokens: slice of the row's token ids.
        tables: for each attention window, the column with the index (in the sequence) of the first page in the table,
            and the slice of the table's page numbers.
        width: number of columns.
    """

    row, start, count, is_chosen, prefill_length, drawn, slot, num_logprobs = range(8)

    def __init__(self, shape: Shape) -> None:
        begin = self.num_logprobs + 1
        self.tokens = slice(begin, begin + shape.length)
        at, self.tables = self.tokens.stop, list[tuple[int, slice]]()
        for count in shape.entries:
            self.tables.append((at, slice(at + 1, at + 1 + count)))
            at += 1 + count
        self.width = at


class RowState(NamedTuple):
    """Sampling state of each row of the engine, on the devices."""

    samplers: Array  # [rows, 7]: temperature, top-k, top-p, min-p; repetition, presence and frequency penalty.
    seed: Array  # [rows]
    written: Written  # Tokens in the row's sequence so far, for penalties.
    bias: Array  # [rows, vocab]: added to the logits.


class Logprobs(NamedTuple):
    """Log probabilities of tokens, and of the likeliest tokens at the same positions, likeliest first."""

    own: Array  # [rows, n]: log probability of each token.
    values: Array  # [rows, n, MOST_LOGPROBS]: log probabilities of the likeliest tokens.
    tokens: Array  # [rows, n, MOST_LOGPROBS]: ids of the likeliest tokens.


def compiler_options() -> dict[str, str]:
    """Return the XLA options of an engine's steps, {name: value}, for the devices of the mesh set by `jax.set_mesh`.

    By default XLA:TPU has one weight in fast memory before a step begins, if it fits there. That is the embedding
    table, which leaves no room to read the layers' weights ahead: a step of Gemma 2 9B takes 24% longer on v5e:4x4
    (libtpu 0.0.42.1, by the compiler's estimates). XLA:GPU counts pages twice, although they are written in place.
    Where they fill half of the memory it runs matmuls again instead of keeping their small results: 7% more flops for
    Llama 3 8B on one H100 with 160 sequences of 2,048 tokens (JAX 0.10.2).
    """
    options = {"tpu": {"xla_max_cross_program_prefetches": "0"}, "gpu": {"xla_disable_hlo_passes": "rematerialization"}}
    return options.get(mesh_platform(), {})


@lru_cache(maxsize=256)
def greedy_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, dtype: Any) -> Any:
    """Return the jitted step in which every row takes the likeliest token.

    It is (params, pages, last, packed, drafts) -> pages, last, made. `last` is the newest token of every row of the
    engine [rows]. `packed` is the input with the columns of `Columns`. `drafts` are draft tokens on the devices
    [shape.rows, shape.num_chosen - 1], or None. `made` are the tokens made [shape.rows, shape.num_chosen]: draft tokens
    up to the first that is not the likeliest, then the likeliest; -1 for none. The pages are donated.

    Args:
        split: how the cache is split over devices in addition to heads.
        dtype: dtype of activations and matmuls.
    """
    layout = decode_layout(model, mesh, split)

    def step(
        params: Any, pages: CacheArrays, last: Array, packed: Array, drafts: Array | None
    ) -> tuple[Any, Array, Array]:
        read, x, table, pages = _through(params, pages, last, packed, model, layout, shape, dtype, drafts=drafts)
        seed = jnp.zeros(shape.rows, jnp.uint32)
        scores = logits(params, x, table, model, layout, slots=read.slot)
        chosen = [
            jax.reshard(choose(own, likeliest_of(seed), Written(), read.drawn), P())
            for own in jnp.unstack(scores, axis=1)
        ]
        made, last = _accepted(read, jnp.stack(chosen, axis=1), last)
        return pages, last, made

    return jax.jit(step, donate_argnums=1, compiler_options=compiler_options())


@lru_cache(maxsize=256)
def sampling_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, dtype: Any) -> Any:
    """Return the jitted step in which each row has its own sampling options.

    It is (params, pages, last, packed, drafts, written, samplers, seed, bias, mask) -> pages, last, made, written,
    `Logprobs` of the chosen tokens. `last`, `packed`, `drafts`, `made` and the arguments are as in `greedy_program`.
    `written` (the tokens so far, for penalties), `samplers`, `seed` and `bias` are the fields of `RowState`. `mask` has
    the bits of the allowed tokens [shape.rows, num_chosen, words]. The pages and `written` are donated.
    """
    layout = decode_layout(model, mesh, split)

    def step(
        params: Any,
        pages: CacheArrays,
        last: Array,
        packed: Array,
        drafts: Array | None,
        written: Written,
        samplers: Array,
        seed: Array,
        bias: Array,
        mask: Array,
    ) -> tuple[Any, Array, Array, Written, Logprobs]:
        read, x, table, pages = _through(params, pages, last, packed, model, layout, shape, dtype, drafts=drafts)
        whole = jax.reshard(logits(params, x, table, model, layout, slots=read.slot), P())
        state = RowState(samplers, seed, written, bias)
        chosen, written = _choose_each(whole, read, state, mask)
        made, last = _accepted(read, chosen, last)
        return pages, last, made, written, _logprobs(whole, chosen, read.num_logprobs)

    return jax.jit(step, donate_argnums=(1, 5), compiler_options=compiler_options())


@lru_cache(maxsize=64)
def scoring_program(model: ModelConfig, mesh: MeshShape, split: CacheSplit, shape: Shape, dtype: Any) -> Any:
    """Return the jitted step that computes log probabilities and hidden states of a chunk of a prompt in each row.

    It is (params, pages, last, packed, targets) -> pages, `Logprobs` of the targets [rows, s], hidden. `targets` has
    the token after each token [rows, s]. `hidden` is the hidden state after the last norm, summed over the row's tokens
    [rows, d], in float32. The pages are donated. Arguments are as in `greedy_program`.
    """
    layout = decode_layout(model, mesh, split)

    def step(
        params: Any, pages: CacheArrays, last: Array, packed: Array, targets: Array
    ) -> tuple[Any, Logprobs, Array]:
        read, x, table, pages = _through(params, pages, last, packed, model, layout, shape, dtype, is_whole=True)
        scores = logits(params, x, table, model, layout, slots=read.slot)
        final = program(model).logits[0]
        assert isinstance(final, Norm)
        hidden = norm(x, final, params[final.name], params.get(f"{final.name}_bias"))
        kept = jax.reshard(read.is_token, layout.spec("batch", "sequence"))
        sums = jnp.sum(jnp.where(kept[..., None], hidden.astype(jnp.float32), 0), axis=1)
        return pages, _logprobs(scores, targets, read.num_logprobs), jax.reshard(sums, P())

    return jax.jit(step, donate_argnums=1, compiler_options=compiler_options())


@lru_cache(maxsize=8)
def row_program() -> Any:
    """Return the jitted (state, row, own) -> state, which sets the sampling state of one row; `state` is donated.

    `own` is the row's state, without the row dim.
    """

    def put(state: RowState, row: Array, own: RowState) -> RowState:
        return jax.tree.map(lambda array, value: array.at[row].set(value), state, own)

    return jax.jit(put, donate_argnums=0)


@lru_cache(maxsize=8)
def copy_program(axes: tuple[str, ...]) -> Any:
    """Return the jitted (pages, sources, targets) -> pages, which copies pages within each shard; they are donated.

    `sources` and `targets` are page numbers [shards, n]. A target past the last page copies nothing.

    axes: mesh axes along which shards have separate pages.
    """

    def copy(pages: Pages, sources: Array, targets: Array) -> Pages:
        def local(stored: Array, sources: Array, targets: Array) -> Array:
            found = stored.at[:, sources[0]].get(mode="clip")
            return stored.at[:, targets[0]].set(found, mode="drop")

        def moved(stored: Array) -> Array:
            spec: Any = jax.typeof(stored).sharding.spec
            own = P(axes or None, None)
            return jax.shard_map(local, in_specs=(spec, own, own), out_specs=spec)(
                stored, jax.reshard(sources, own), jax.reshard(targets, own)
            )

        return jax.tree.map(moved, pages)

    return jax.jit(copy, donate_argnums=0)


class _StepColumns(NamedTuple):
    """Columns of a step's packed input as arrays [rows] or [rows, s], on every device; see `Columns`."""

    row: Array
    tokens: Array  # [rows, s], with draft tokens.
    is_token: Array  # [rows, s]: False for padding.
    is_chosen: Array
    drawn: Array
    slot: Array
    num_logprobs: Array


def _through(
    params: Any,
    pages: CacheArrays,
    last: Array,
    packed: Array,
    model: ModelConfig,
    layout: ShardingContext,
    shape: Shape,
    dtype: Any,
    *,
    drafts: Array | None = None,
    is_whole: bool = False,
) -> tuple[_StepColumns, Array, Array, CacheArrays]:
    """Run the layers on a step's tokens.

    is_whole: whether to return the residual stream of all tokens, or only of those after which a token is chosen. The
    other arguments are those of `greedy_program` and of the step that it returns.

    Returns:
        The columns of the packed input, the residual stream [rows, s or n, d], the embedding table, and the pages.
    """
    columns, spec = shape.columns, layout.spec("batch", "sequence")
    # Each device reads the packed input of its own rows. Columns that every device needs are read from the replicated
    # array, to avoid a gather.
    own = jax.reshard(packed, spec)
    tokens = with_newest_tokens(own[:, columns.tokens], last, own, layout)
    if drafts is not None:
        tokens = jnp.concatenate([tokens[:, :1], jax.reshard(drafts, spec)], axis=1)
    x, table, pages = through_pages(params, pages, tokens, own, columns.tables, model, layout, dtype)
    places = jnp.arange(shape.length)[None]
    if not is_whole and shape.num_chosen < shape.length:
        # One term per row is nonzero, so the sum is exact.
        is_last = places == jnp.maximum(own[:, Columns.count, None] - 1, 0)
        x = lax.reduce_sum(jnp.where(is_last[..., None], x, 0), axes=(1,))[:, None]
    asked = packed[:, columns.tokens]
    read = _StepColumns(
        row=packed[:, Columns.row],
        tokens=asked if drafts is None else jnp.concatenate([asked[:, :1], drafts], axis=1),
        is_token=places < packed[:, Columns.count, None],
        is_chosen=packed[:, Columns.is_chosen] > 0,
        drawn=packed[:, Columns.drawn],
        slot=packed[:, Columns.slot],
        num_logprobs=packed[:, Columns.num_logprobs],
    )
    return read, x, table, pages


def with_newest_tokens(tokens: Array, last: Array, own: Array, layout: ShardingContext) -> Array:
    """Return tokens [rows, s] with FROM_LAST replaced by the newest token of the row.

    Args:
        tokens: token ids of the step.
        last: the newest token of every row of the engine [rows].
        own: the packed input of the step, sharded by rows.
    """
    newest = last.at[own[:, Columns.row]].get(mode="clip", out_sharding=layout.spec("batch"))
    return jnp.where(tokens == FROM_LAST, newest[:, None], tokens)


def through_pages(
    params: Any,
    pages: CacheArrays,
    tokens: Array,
    own: Array,
    tables: Sequence[tuple[int, slice]],
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
    place: int = 0,
) -> tuple[Array, Array, CacheArrays]:
    """Run the layers on tokens [rows, s]: the tokens of each row's step from index `place` on.

    Args:
        own: the packed input of the step, sharded by rows.
        tables: for each of `pages`, the columns of its page table; see `Columns.tables`.
        place: index of the first token in the row's tokens of this step.

    Returns:
        The residual stream [rows, s, d], the embedding table, and the updated cache.
    """
    start, count = own[:, Columns.start, None], own[:, Columns.count, None]
    places = place + jnp.arange(tokens.shape[1])[None]
    # Padding gets the last token's position, so that its softmax is not empty.
    positions = start + jnp.minimum(places, jnp.maximum(count - 1, 0))
    caches: list[Any] = [
        PagedCache(each, own[:, entries], own[:, first], places < count)
        for each, (first, entries) in zip(pages[: len(tables)], tables, strict=True)
    ]
    # After the pages come the states of linear attention, if any.
    caches += [DeltaCache(each, own[:, Columns.row], start[:, 0], count[:, 0]) for each in pages[len(tables) :]]
    x, table, caches = through_cache(
        params,
        tokens,
        positions,
        tuple(caches),
        model,
        layout,
        dtype,
        lengths=jnp.maximum(positions + 1, own[:, Columns.prefill_length, None]),
        slots=own[:, Columns.slot],
    )
    return x, table, tuple(cache.state if isinstance(cache, DeltaCache) else cache.pages for cache in caches)


def _choose_each(scores: Array, read: _StepColumns, state: RowState, mask: Array) -> tuple[Array, Written]:
    """Choose a token from each of the logits `scores` [rows, n, vocab].

    Returns:
        The tokens [rows, n], and the token counts (`Written`) of all rows of the engine. Of a row with draft tokens,
        the counts include the drafts that equal the chosen tokens, and the token after them.
    """
    vocab = scores.shape[-1]
    samplers = samplers_at(state.samplers, state.seed, read.row)
    bias, written = (
        jax.tree.map(lambda array: array.at[read.row].get(mode="clip"), own) for own in (state.bias, state.written)
    )
    seen, made, kept = state.written.seen, state.written.made, list[Array]()
    assert seen is not None
    assert made is not None
    is_taken = read.is_chosen
    for place, own in enumerate(jnp.unstack(scores, axis=1)):
        bits = (
            jnp.repeat(mask[:, place], WORD, axis=-1)[:, :vocab] >> (jnp.arange(vocab, dtype=jnp.uint32) % WORD)[None]
        )
        allowed = jnp.where(bits & 1, own + bias, -jnp.inf)
        chosen = jax.reshard(choose(allowed, samplers, written, read.drawn + place), P())
        kept.append(chosen)
        at = jnp.where(is_taken, read.row, seen.shape[0])
        seen = seen.at[at, chosen].set(True, mode="drop")
        made = made.at[at, chosen].add(1, mode="drop")
        written = with_chosen(written, chosen)
        if place + 1 < scores.shape[1]:
            is_taken &= (read.tokens[:, place + 1] == chosen) & read.is_token[:, place + 1]
    return jnp.stack(kept, axis=1), Written(seen, made)


def samplers_at(limits: Array, seed: Array, row: Array) -> Samplers:
    """Return the sampling options of the rows `row`. limits, seed: `samplers` and `seed` of `RowState`, of all rows."""
    own = [limits.at[row, at].get(mode="clip") for at in range(limits.shape[1])]
    return Samplers(
        temperature=own[0],
        top_k=own[1].astype(jnp.int32),
        top_p=own[2],
        min_p=own[3],
        repetition_penalty=own[4],
        presence_penalty=own[5],
        frequency_penalty=own[6],
        seed=seed.at[row].get(mode="clip"),
    )


def _accepted(read: _StepColumns, chosen: Array, last: Array) -> tuple[Array, Array]:
    """Return the accepted tokens [rows, n], -1 for none, and the newest token of every row of the engine.

    Draft tokens are accepted up to the first that differs from the chosen token at its position; that chosen token is
    accepted in its place, and is the last.
    """
    num_chosen = chosen.shape[1]
    if num_chosen == 1:
        taken = jnp.ones_like(read.row)
    else:
        agrees = (read.tokens[:, 1:] == chosen[:, :-1]) & read.is_token[:, 1:]
        taken = 1 + jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
    is_made = (jnp.arange(num_chosen)[None] < taken[:, None]) & read.is_chosen[:, None]
    newest = jnp.take_along_axis(chosen, taken[:, None] - 1, axis=1)[:, 0]
    at = jnp.where(read.is_chosen, read.row, last.shape[0])
    return jnp.where(is_made, chosen, -1), last.at[at].set(newest.astype(last.dtype), mode="drop")


def _logprobs(scores: Array, tokens: Array, num_wanted: Array) -> Logprobs:
    """Return the log probabilities of tokens [rows, n], and of the likeliest tokens, from logits [rows, n, vocab].

    num_wanted: `Columns.num_logprobs` of each row. Results that no row requests are zeros.
    """
    shape, most = (*tokens.shape, min(MOST_LOGPROBS, scores.shape[-1])), jnp.max(num_wanted)

    def none_likeliest() -> tuple[Array, Array]:
        return jnp.zeros(shape, scores.dtype), jnp.zeros(shape, jnp.int32)

    def wanted() -> Logprobs:
        # Logits may be split over the vocabulary; only the likeliest tokens need them whole.
        totals = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        is_own = lax.broadcasted_iota(tokens.dtype, scores.shape, 2, out_sharding=jax.typeof(scores).sharding)
        placed = jax.reshard(tokens, P(*jax.typeof(scores).sharding.spec[:2]))
        own = jnp.sum(jnp.where(is_own == placed[..., None], scores - totals, 0), axis=-1)

        def likeliest() -> tuple[Array, Array]:
            return tuple(lax.top_k(jax.reshard(scores - totals, P()), shape[-1]))  # type: ignore

        return Logprobs(jax.reshard(own, P()), *lax.cond(most > 1, likeliest, none_likeliest))

    return lax.cond(most > 0, wanted, lambda: Logprobs(jnp.zeros(tokens.shape, scores.dtype), *none_likeliest()))
