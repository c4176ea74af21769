"""Runs steps on the devices: the parameters, the pages, and the programs, all compiled before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.inference import LoadedModel
from meshwright.models import GREEDY, Sampling
from meshwright.models.generation import decode_layout, placed_params
from meshwright.models.int8_weights import in_int8
from meshwright.models.paged_cache import Pages, abstract_pages, page_axes
from meshwright.models.sampling import Written
from meshwright.models.stationary import for_tpu_products
from meshwright.runtime import DTYPES, ShardingContext
from meshwright.serving.draft_programs import draft_prefill_program, draft_program
from meshwright.serving.faults import on_devices
from meshwright.serving.layout import stored_dtype
from meshwright.serving.programs import (
    WORD,
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
from meshwright.serving.settings import EngineLayout, EngineSettings
from meshwright.step import ModelConfig
from meshwright.step.serve import layers_by_window

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


@dataclass
class _Draft:
    """A model that drafts, and its pages. group: of the served model's page tables, the one that it uses."""

    config: ModelConfig
    params: Any
    pages: tuple[Pages, ...]
    group: int
    dtype: Any


class Runner:
    """The device side of an engine. Calls are to be in the same order on all processes.

    before_run: called with each step before it is dispatched, as other processes have to dispatch it too.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: EngineLayout,
        context: ShardingContext,
        settings: EngineSettings,
        draft: LoadedModel | None = None,
    ) -> None:
        self._config, self._mesh, self._dtype = model.config, model.mesh, DTYPES[model.dtype]
        self._layout, self._context = layout, context
        assert context.cache_split is not None
        self._split = context.cache_split
        self._rows = layout.shards * layout.rows
        with jax.set_mesh(self._mesh):
            self._params = placed_params(model.params, model.config, context)
            if settings.weight_dtype == "int8":
                self._params = in_int8(self._params, model.config)
            self._params = for_tpu_products(self._params, model.config)
            stored = stored_dtype(model, settings)
            self._pages = _empty_pages(model.config, context, layout.pages, layout.page_size, stored)
            self._draft = None
            if draft is not None:
                # Under the numbers of the pages that have all tokens of a text.
                group = layout.windows.index(None)
                of = decode_layout(draft.config, context.mesh, self._split)
                counts = (layout.pages[group],) * len(layers_by_window(draft.config))
                self._draft = _Draft(
                    draft.config,
                    for_tpu_products(placed_params(draft.params, draft.config, of), draft.config),
                    _empty_pages(draft.config, of, counts, layout.page_size, DTYPES[draft.dtype]),
                    group,
                    DTYPES[draft.dtype],
                )
            self._last = jnp.zeros(self._rows, jnp.int32)
            vocab = model.config.vocab
            self._state = RowState(
                jnp.tile(jnp.asarray(_limits(GREEDY))[None], (self._rows, 1)),
                jnp.zeros(self._rows, jnp.uint32),
                Written(jnp.zeros((self._rows, vocab), bool), jnp.zeros((self._rows, vocab), jnp.int32)),
                jnp.zeros((self._rows, vocab), jnp.float32),
            )
        self.before_run: Callable[[Work], None] = lambda work: None
        self._free_masks = dict[tuple[int, int], Any]()
        self._compiled = dict[tuple[str, Shape], Any]()
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._compiling = dict[tuple[str, Shape], Future[bool]]()

    @property
    def has_draft(self) -> bool:
        """Whether a model makes the drafts."""
        return self._draft is not None

    @property
    def words(self) -> int:
        """The words of a mask."""
        return -(-self._config.vocab // WORD)

    def shape_of(self, step: Step) -> Shape:
        """The shape of a step's program."""
        entries = self._layout.entries(step.width, step.length)
        return Shape(self._layout.shards * step.rows, step.length, entries, 1 if step.is_chunk else step.length)

    @cached_property
    def programs(self) -> tuple[tuple[str, Shape], ...]:
        """Every kind and shape of step that is compiled before the first request; see `is_compiled` for scoring."""
        layout = self._layout
        steps = [
            *(
                Step([], False, rows, width, 1 + layout.num_drafts)
                for rows in layout.decoded
                for width in layout.widths
            ),
            *(Step([], True, rows, width, length) for rows, length in layout.chunks for width in layout.widths),
        ]
        found = [(kind, self.shape_of(step)) for step in steps for kind in ("greedy", "sampling")]
        if jax.process_count() > 1:
            # While one process compiles the others would wait in a collective.
            found += [
                ("scoring", self.shape_of(Step([], True, rows, width, length)))
                for rows, length in layout.scored
                for width in layout.widths
            ]
        return tuple(dict.fromkeys(found))

    def compile(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every program, several at once. on_program: called with how many are compiled, of how many.

        Only what scores prompts is compiled later: no request that generates text ever waits for the compiler.
        """
        self._abstract = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
            (self._params, self._pages, self._last, self._draft and (self._draft.params, self._draft.pages)),
        )
        with jax.set_mesh(self._mesh), ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            lowered = {
                (name, shape): step for kind, shape in self.programs for name, step in self._lowered(kind, shape)
            }
            compiling = {pool.submit(step.compile): key for key, step in lowered.items()}
            for number, done in enumerate(as_completed(compiling), start=1):
                self._compiled[compiling[done]] = done.result()
                on_program(number, len(compiling))
        # One change and one copy, after which all is as before.
        with jax.set_mesh(self._mesh):
            self._state = row_program()(self._state, np.int32(0), self.row_state(RowChange(0, GREEDY, (), (), ())))
        self._copy([PageCopy(0, window, 0, count) for window, count in enumerate(self._layout.pages)])
        jax.block_until_ready((self._pages, self._state))

    def is_compiled(self, step: Step) -> bool:
        """Whether a scoring step can run. Its program is compiled from the first call on, in a thread.

        Raises:
            Exception: what the compiler has raised.
        """
        key = ("scoring", self.shape_of(step))
        if key in self._compiled:
            return True
        if key not in self._compiling:
            self._compiling[key] = self._compiler.submit(self._compile_later, *key)
        return self._compiling[key].done() and self._compiling[key].result()

    def _compile_later(self, kind: str, shape: Shape) -> bool:
        with jax.set_mesh(self._mesh):
            self._compiled |= {(name, shape): step.compile() for name, step in self._lowered(kind, shape)}
        return True

    def close(self) -> None:
        """Wait for the compiler, under which Python cannot end."""
        self._compiler.shutdown(cancel_futures=True)

    def _lowered(self, kind: str, shape: Shape) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """A step's program, and the draft model's for the same step, traced for the arrays on the devices."""
        program = {"greedy": greedy_program, "sampling": sampling_program, "scoring": scoring_program}[kind]
        made = program(self._config, self._context.mesh, self._split, shape, self._dtype)
        numbers = np.zeros((shape.rows, shape.columns.width), np.int32)
        work, drafts = Work(kind, shape, numbers), None
        if kind == "scoring":
            # Not for the arrays themselves, which the steps that run meanwhile donate.
            params, pages, last, draft = self._abstract
            if self._draft is not None:
                own = (self._draft.config, self._context.mesh, self._split, shape, self._draft.group, self._draft.dtype)
                yield "prefill", draft_prefill_program(*own).lower(*draft, numbers)
            yield kind, made.lower(params, pages, last, numbers, np.zeros((shape.rows, shape.length), np.int32))
            return
        if self._draft is not None:
            draft_kind = self._draft_kind(work)
            own = (self._draft.config, self._context.mesh, self._split, shape, self._draft.group, self._draft.dtype)
            yield (
                draft_kind,
                (draft_prefill_program if draft_kind == "prefill" else draft_program)(*own).lower(
                    *self._draft_arguments(work)
                ),
            )
            if draft_kind != "prefill":
                drafts = jnp.zeros((shape.rows, shape.length - 1), jnp.int32)
        yield kind, made.lower(*self._arguments(work, drafts))

    @staticmethod
    def _draft_kind(work: Work) -> str:
        """The draft model's program for a step: prefill of the same tokens, or the drafts that the step verifies."""
        return "prefill" if work.shape.num_chosen == 1 or work.kind == "scoring" else f"draft, {work.kind}"

    def _draft_arguments(self, work: Work) -> tuple[Any, ...]:
        assert self._draft is not None
        if self._draft_kind(work) == "prefill":
            return (self._draft.params, self._draft.pages, work.numbers)
        own = (self._state.samplers, self._state.seed) if work.kind == "sampling" else (None, None)
        return (self._draft.params, self._draft.pages, self._last, work.numbers, *own)

    def _arguments(self, work: Work, drafts: Array | None) -> tuple[Any, ...]:
        state = (self._params, self._pages, self._last, work.numbers)
        if work.kind == "scoring":
            return (*state, work.targets)
        if work.kind == "greedy":
            return (*state, drafts)
        own, mask = self._state, work.mask if work.mask is not None else self._free_mask(work.shape)
        return (*state, drafts, own.written, own.samplers, own.seed, own.bias, mask)

    def run(self, work: Work) -> Result:
        """Dispatch a step; its results are still to come.

        Raises:
            DeviceError: a program failed. After any other exception nothing was dispatched.
        """
        changes = [(change.row, self.row_state(change)) for change in work.changes]
        program = self._compiled[work.kind, work.shape]
        with on_devices(), jax.set_mesh(self._mesh):
            self.before_run(work)
            for row, own in changes:
                self._state = row_program()(self._state, np.int32(row), own)
            if work.copies:
                self._copy(work.copies)
            drafts = None
            if self._draft is not None:
                draft_kind = self._draft_kind(work)
                made = self._compiled[draft_kind, work.shape](*self._draft_arguments(work))
                self._draft.pages, drafts = (made, None) if draft_kind == "prefill" else made
            made = program(*self._arguments(work, drafts))
            if work.kind == "scoring":
                self._pages, logprobs, hidden = made
                return Result(None, logprobs, hidden)
            self._pages, self._last, tokens, *rest = made
            if not rest:
                return Result(tokens, None, None)
            self._state = self._state._replace(written=rest[0])
            return Result(tokens, rest[1], None)

    def _free_mask(self, shape: Shape) -> Array:
        """A mask that allows all tokens, kept on the devices."""
        size = (shape.rows, shape.num_chosen)
        if size not in self._free_masks:
            self._free_masks[size] = jnp.full((*size, self.words), 0xFFFFFFFF, jnp.uint32)
        return self._free_masks[size]

    def row_state(self, change: RowChange) -> RowState:
        """What the devices keep of a row, on the host."""
        vocab = self._config.vocab
        seen, made, bias = np.zeros(vocab, bool), np.zeros(vocab, np.int32), np.zeros(vocab, np.float32)
        seen[list(change.prompt)] = True
        seen[list(change.made)] = True
        np.add.at(made, list(change.made), 1)
        for token, value in change.bias:
            bias[token] = value
        return RowState(_limits(change.sampling), np.uint32(change.sampling.seed), Written(seen, made), bias)  # type: ignore

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
                        targets[shard, place] = copy.target
                with jax.set_mesh(self._mesh):
                    pages[window] = copy_program(axes)(pages[window], sources, targets)
                    if self._draft is not None and self._draft.group == window:
                        self._draft.pages = tuple(
                            copy_program(page_axes(self._context, self._draft.config))(each, sources, targets)
                            for each in self._draft.pages
                        )
        self._pages = tuple(pages)


def _empty_pages(
    model: ModelConfig, context: ShardingContext, counts: tuple[int, ...], page_size: int, dtype: Any
) -> tuple[Pages, ...]:
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec),
        abstract_pages(model, context, counts, page_size, dtype),
    )


def _limits(sampling: Sampling) -> np.ndarray:
    return np.array([getattr(sampling, name) for name in LIMITS], np.float32)
