"""Runs steps on the devices: the parameters, the pages, and the programs, all compiled before the first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.inference import LoadedModel
from meshwright.models import GREEDY, Sampling
from meshwright.models.generation import placed_params
from meshwright.models.paged_cache import Pages, abstract_pages, page_axes
from meshwright.models.sampling import Written
from meshwright.runtime import DTYPES, ShardingContext
from meshwright.serving.programs import (
    WORD,
    Columns,
    Logprobs,
    RowState,
    Shape,
    copy_program,
    greedy_program,
    row_program,
    sampling_program,
    scoring_program,
)
from meshwright.serving.scheduler import PageCopy, Step
from meshwright.serving.settings import EngineLayout, KvDtype

COPIES = 8
"""Pages of a shard that one program copies."""

LIMITS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
"""The fields of a `Sampling` in the order of `RowState.samplers`."""


class RowChange(NamedTuple):
    """How tokens of a row are chosen from now on: its text so far, and what is added to the logits of some tokens."""

    row: int
    sampling: Sampling
    prompt: Sequence[int]
    made: Sequence[int]
    bias: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Work:
    """A step in numbers, the same on every process.

    Args:
        kind: every row takes the likeliest token, each its own, or a prompt is scored.
        numbers: see `Columns`. mask: bits of the tokens that rows may take, where some may not. targets: of scoring.
    """

    kind: str
    shape: Shape
    numbers: np.ndarray
    mask: np.ndarray | None = None
    targets: np.ndarray | None = None
    copies: tuple[PageCopy, ...] = ()
    changes: tuple[RowChange, ...] = ()


class Result(NamedTuple):
    """What a step leaves on the devices: tokens made [rows, n], -1 for none; log probabilities; hidden states."""

    made: Array | None
    logprobs: Logprobs | None
    hidden: Array | None


class Runner:
    """The device side of an engine. Calls are to be in the same order on all processes."""

    def __init__(
        self, model: LoadedModel, layout: EngineLayout, context: ShardingContext, kv_dtype: KvDtype | None
    ) -> None:
        self._config, self._mesh, self._dtype = model.config, model.mesh, DTYPES[model.dtype]
        self._layout, self._context = layout, context
        assert context.cache_split is not None
        self._split = context.cache_split
        self._rows = layout.shards * layout.rows
        stored = jnp.int8 if kv_dtype == "int8" else self._dtype
        with jax.set_mesh(self._mesh):
            self._params = placed_params(model.params, model.config, context)
            pages = abstract_pages(model.config, context, layout.pages, layout.page_size, stored)
            self._pages: tuple[Pages, ...] = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), pages
            )
            self._last = jnp.zeros(self._rows, jnp.int32)
            vocab = model.config.vocab
            self._state = RowState(
                jnp.tile(jnp.asarray(_limits(GREEDY))[None], (self._rows, 1)),
                jnp.zeros(self._rows, jnp.uint32),
                Written(jnp.zeros((self._rows, vocab), bool), jnp.zeros((self._rows, vocab), jnp.int32)),
                jnp.zeros((self._rows, vocab), jnp.float32),
            )
        self._free_masks = dict[tuple[int, int], Any]()

    @property
    def words(self) -> int:
        """The words of a mask."""
        return -(-self._config.vocab // WORD)

    def shape_of(self, step: Step) -> Shape:
        """The shape of a step's program."""
        rows = self._rows if step.chunk is None else self._layout.shards * self._layout.chunks[step.chunk][0]
        entries = self._layout.entries(step.width, step.length)
        return Shape(rows, step.length, entries, step.length if step.chunk is None else 1)

    @cached_property
    def programs(self) -> tuple[tuple[str, Shape], ...]:
        """Every kind and shape of step that there can be."""
        layout = self._layout
        found = list[tuple[str, Shape]]()
        for width in layout.widths:
            decode = self.shape_of(Step([], None, width, 1 + layout.num_drafts))
            found += [("greedy", decode), ("sampling", decode)]
            for number, (_, length) in enumerate(layout.chunks):
                chunk = self.shape_of(Step([], number, width, length))
                found += [("greedy", chunk), ("sampling", chunk), ("scoring", chunk)]
        return tuple(dict.fromkeys(found))

    def compile(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every program by running it once for no row. on_program: called with those done and their number."""
        for number, (kind, shape) in enumerate(self.programs, start=1):
            numbers = np.zeros((shape.rows, shape.columns.width), np.int32)
            numbers[:, Columns.row] = self._rows
            targets = np.zeros((shape.rows, shape.length), np.int32) if kind == "scoring" else None
            for mask in (None, np.zeros((shape.rows, shape.num_chosen, self.words), np.uint32)):
                if mask is None or kind == "sampling":
                    jax.block_until_ready(self.run(Work(kind, shape, numbers, mask, targets)))
            on_program(number, len(self.programs))
        # One change and one copy, which are as if they were not.
        change = RowChange(0, GREEDY, (), (), ())
        copies = tuple(PageCopy(0, window, 0, -1) for window in range(len(self._layout.windows)))
        self._change(change)
        self._copy(copies)
        jax.block_until_ready((self._pages, self._state))

    def run(self, work: Work) -> Result:
        """Dispatch a step; its results are still to come."""
        with jax.set_mesh(self._mesh):
            for change in work.changes:
                self._change(change)
            if work.copies:
                self._copy(work.copies)
            of = (self._config, self._context.mesh, self._split, work.shape, self._dtype)
            state = (self._params, self._pages, self._last, work.numbers)
            if work.kind == "greedy":
                self._pages, self._last, made = greedy_program(*of)(*state)
                return Result(made, None, None)
            if work.kind == "scoring":
                self._pages, logprobs, hidden = scoring_program(*of)(*state, work.targets)
                return Result(None, logprobs, hidden)
            own, mask = self._state, work.mask if work.mask is not None else self._free_mask(work.shape)
            self._pages, self._last, made, written, logprobs = sampling_program(*of)(
                *state, own.written, own.samplers, own.seed, own.bias, mask
            )
            self._state = own._replace(written=written)
            return Result(made, logprobs, None)

    def _free_mask(self, shape: Shape) -> Array:
        """A mask that allows all tokens, kept on the devices."""
        size = (shape.rows, shape.num_chosen)
        if size not in self._free_masks:
            self._free_masks[size] = jnp.full((*size, self.words), 0xFFFFFFFF, jnp.uint32)
        return self._free_masks[size]

    def _change(self, change: RowChange) -> None:
        vocab = self._config.vocab
        seen, made, bias = np.zeros(vocab, bool), np.zeros(vocab, np.int32), np.zeros(vocab, np.float32)
        seen[list(change.prompt)] = True
        seen[list(change.made)] = True
        np.add.at(made, list(change.made), 1)
        for token, value in change.bias:
            bias[token] = value
        own = RowState(_limits(change.sampling), np.uint32(change.sampling.seed), Written(seen, made), bias)  # type: ignore
        state = self._state
        with jax.set_mesh(self._mesh):
            written, samplers, seed, biases = row_program()(
                state.written, state.samplers, state.seed, state.bias, np.int32(change.row), own
            )
        self._state = RowState(samplers, seed, written, biases)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        axes, pages = page_axes(self._context, self._config), list(self._pages)
        for window, count in enumerate(self._layout.pages):
            own = [copy for copy in copies if copy.window == window]
            by_shard = [[copy for copy in own if copy.shard == shard] for shard in range(self._layout.shards)]
            for at in range(0, max(map(len, by_shard)), COPIES):
                sources = np.zeros((self._layout.shards, COPIES), np.int32)
                targets = np.full((self._layout.shards, COPIES), count, np.int32)
                for shard, group in enumerate(by_shard):
                    for place, copy in enumerate(group[at : at + COPIES]):
                        sources[shard, place] = copy.source
                        targets[shard, place] = count if copy.target < 0 else copy.target
                with jax.set_mesh(self._mesh):
                    pages[window] = copy_program(axes)(pages[window], sources, targets)
        self._pages = tuple(pages)


def _limits(sampling: Sampling) -> np.ndarray:
    return np.array([getattr(sampling, name) for name in LIMITS], np.float32)
