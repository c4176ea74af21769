"""Run steps on the devices; `Runner` has the parameters, pages and compiled programs.

The programs with the widest page tables can run every step except scoring, so a server is ready once these are
compiled. Programs with narrower tables save time, and are compiled while requests are already answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.serve import layers_by_window
from meshwright.description.step.serving import SERVING_RULES
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.delta_state import abstract_states
from meshwright.execution.models.generation.generate import decode_layout, placed_params
from meshwright.execution.models.generation.paged_cache import Pages, abstract_pages, page_axes
from meshwright.execution.models.generation.sampling import GREEDY, Sampling, Written
from meshwright.execution.models.generation.stationary import for_server_products
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.models.quantised.scaled import in_format
from meshwright.execution.runtime.arrays import DTYPES
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.serving.engine.adapters import SlotWeights, empty_factors, with_empty_slots, write_slot
from meshwright.serving.engine.draft_programs import draft_prefill_program, draft_program, why_not_draft
from meshwright.serving.engine.faults import device_errors
from meshwright.serving.engine.layout import stored_dtype
from meshwright.serving.engine.programs import (
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
from meshwright.serving.engine.scheduler import EngineStep, PageCopy
from meshwright.serving.engine.settings import EngineLayout, EngineSettings

COPIES = 8
"""Number of pages of each shard that one call of the copy program copies."""

LIMITS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
"""Fields of `Sampling` in the order of `RowState.samplers`."""


class RowChange(NamedTuple):
    """New sampling options of a row of the engine, and its sequence so far, to which penalties apply."""

    row: int
    sampling: Sampling
    prompt: Sequence[int]
    made: Sequence[int]  # Generated tokens.
    bias: Sequence[tuple[int, float]]  # (token, number added to its logit).


@dataclass(frozen=True)
class Work:
    """The input of a step, the same on every process.

    Args:
        kind: the program: "greedy", "sampling" (each row with its own options) or "scoring" of prompts.
        packed: the packed input, int32 [rows, width]; see `Columns`.
        mask: bits of the tokens that each row may choose [rows, num_chosen, words]; None if all may be chosen.
        targets: the token after each token [rows, s], for scoring.
        copies: pages to copy before the step.
        changes: new sampling options to set before the step.
    """

    kind: str
    shape: Shape
    packed: np.ndarray
    mask: np.ndarray | None = None
    targets: np.ndarray | None = None
    copies: tuple[PageCopy, ...] = ()
    changes: tuple[RowChange, ...] = ()


class Result(NamedTuple):
    """Results of a step, on the devices; None for what its program does not compute."""

    made: Array | None  # Accepted tokens [rows, n], -1 for none.
    logprobs: Logprobs | None
    hidden: Array | None  # Hidden states summed over each row's tokens [rows, d].


class _Arrays(NamedTuple):
    """Device arrays that programs take: parameters and pages of the model and of its draft model, and row states."""

    params: Any
    pages: tuple[Pages, ...]
    last: Array  # The newest token of each row of the engine [rows].
    state: RowState
    draft_params: Any
    draft_pages: tuple[Pages, ...]


@dataclass
class _Draft:
    """A draft model and its pages.

    group: index of the page table that the draft model shares; the served model has one for each attention window.
    """

    config: ModelConfig
    context: ShardingContext
    params: Any
    group: int
    dtype: Any
    pages: tuple[Pages, ...] = ()


class Runner:
    """The device side of an engine. All processes must make the same calls in the same order.

    Attributes:
        model: the model; its parameters are left out if the runner stores them in arrays of its own.
        before_run: called with each step or adapter before it is dispatched. Process 0 sends it to the others in it.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: EngineLayout,
        context: ShardingContext,
        settings: EngineSettings,
        draft: LoadedModel | None = None,
    ) -> None:
        if draft is not None and (reason := why_not_draft(draft.config, model.config, settings.num_drafts)):
            raise MeshwrightError(f"{draft.config.name} cannot draft for {model.config.name}: {reason}")
        self._mesh, self._dtype = model.mesh, DTYPES[model.dtype]
        self._config = settings.with_slots(model.config)
        # Quantised parameters and, except on CPUs, those of each layer are new arrays; the loaded ones are dropped.
        has_own = settings.weight_dtype is not None or model.system.chip.kind != "cpu"
        self.model = replace(model, params={}) if has_own else model
        self._layout, self._context = layout, context
        assert context.cache_split is not None
        self._split = context.cache_split
        self._rows = layout.shards * layout.rows
        with jax.set_mesh(self._mesh):
            self._params = placed_params(model.params, model.config, context)
            if settings.weight_dtype is not None:
                self._params = in_format(self._params, model.config, context, settings.weight_dtype)
            if settings.adapter_slots:
                self._params = with_empty_slots(self._params, self._config, context, self._dtype)
            self._params = for_server_products(self._params, self._config)
            self._draft = None
            if draft is not None:
                # It uses the page numbers of layers without a window, whose pages have all tokens of a sequence.
                group = layout.windows.index(None)
                of = decode_layout(draft.config, context.mesh, self._split)
                params = for_server_products(placed_params(draft.params, draft.config, of), draft.config)
                self._draft = _Draft(draft.config, of, params, group, DTYPES[draft.dtype])
            pages, self._last, self._state = self._empty_arrays(stored_dtype(model, settings))
            self._pages, draft_pages = pages
            if self._draft is not None:
                self._draft.pages = draft_pages
        self.before_run: Callable[[Work | SlotWeights], None] = lambda work: None
        self._free_masks = dict[tuple[int, int], Any]()
        self._compiled = dict[tuple[str, Shape], Any]()
        self._compiler, self._narrow_compiler = (ThreadPoolExecutor(1, "compiler") for _ in range(2))
        self._compiling = dict[tuple[str, Shape], Future[bool]]()

    def _empty_arrays(self, dtype: Any) -> Any:
        """Return, all from one program: (pages of the model, pages of its draft model), newest tokens, row states.

        dtype: dtype of keys and values in the model's pages.
        """
        layout, vocab = self._layout, self._vocab
        pages = abstract_pages(self._config, self._context, layout.pages, layout.page_size, dtype)
        states = abstract_states(self._config, self._context, self._rows, self._dtype)
        wanted: list[Any] = [(*pages, *states), ()]
        if (draft := self._draft) is not None:
            counts = (layout.pages[draft.group],) * len(layers_by_window(draft.config))
            wanted[1] = abstract_pages(draft.config, draft.context, counts, layout.page_size, draft.dtype)

        def make() -> Any:
            pages = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), tuple(wanted)
            )
            state = RowState(
                jnp.tile(jnp.asarray(_limits(GREEDY))[None], (self._rows, 1)),
                jnp.zeros(self._rows, jnp.uint32),
                Written(jnp.zeros((self._rows, vocab), bool), jnp.zeros((self._rows, vocab), jnp.int32)),
                jnp.zeros((self._rows, vocab), jnp.float32),
            )
            return pages, jnp.zeros(self._rows, jnp.int32), state

        return jax.jit(make)()

    @property
    def has_draft(self) -> bool:
        """Whether a draft model computes the draft tokens."""
        return self._draft is not None

    @property
    def _vocab(self) -> int:
        """Number of logits of a token, padding included."""
        return padded(self._config, self._context.mesh, SERVING_RULES).vocab

    @property
    def words(self) -> int:
        """Number of 32-bit words of a token mask."""
        return -(-self._vocab // WORD)

    def shape_of(self, step: EngineStep) -> Shape:
        """Return the shape of a step, over all shards."""
        entries = self._layout.entries(step.width, step.length)
        return Shape(self._layout.shards * step.rows, step.length, entries, 1 if step.is_chunk else step.length)

    @cached_property
    def programs(self) -> tuple[tuple[str, Shape], ...]:
        """The programs of all steps that generate text, as (kind, shape), widest page tables first.

        The sampling program also processes chunks of prompts, with temperature 0 for greedy rows: choosing a token is
        cheap compared with a chunk, and a greedy program of each shape would double compile time.
        """
        layout, found = self._layout, list[tuple[str, Shape]]()
        for width in reversed(layout.widths):
            for rows in layout.decoded:
                shape = self.shape_of(EngineStep([], False, rows, width, 1 + layout.num_drafts))
                found += [("greedy", shape), ("sampling", shape)]
            found += [
                ("sampling", self.shape_of(EngineStep([], True, rows, width, length))) for rows, length in layout.chunks
            ]
        return tuple(dict.fromkeys(found))

    @cached_property
    def first_programs(self) -> tuple[tuple[str, Shape], ...]:
        """The programs that are compiled before the first request; see `is_compiled` for scoring."""
        layout = self._layout
        if jax.process_count() == 1:
            # `programs` begins with the widest page tables: two for each row count of decode steps, one for each chunk.
            return self.programs[: 2 * len(layout.decoded) + len(layout.chunks)]
        # With several processes, compile the programs for scoring before the first request too: if one process compiled
        # later than the others, these would wait in a collective.
        scored = [
            ("scoring", self.shape_of(EngineStep([], True, rows, width, length)))
            for rows, length in layout.chunks
            for width in layout.widths
        ]
        return (*self.programs, *scored)

    def compile(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile the first programs, several at once; then start to compile the others in a thread.

        on_program: called with the number of first programs compiled so far, and the number of all first programs.
        """
        self._abstract = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.format), self._arrays
        )
        with jax.set_mesh(self._mesh), ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            lowered = {
                (name, shape): step for kind, shape in self.first_programs for name, step in self._lowered(kind, shape)
            }
            compiling = {pool.submit(step.compile): key for key, step in lowered.items()}
            for number, done in enumerate(as_completed(compiling), start=1):
                self._compiled[compiling[done]] = done.result()
                on_program(number, len(compiling))
        # Compile the smaller programs by calls without effect: greedy options for a row, a copy to no page, an adapter
        # of zeros.
        with jax.set_mesh(self._mesh):
            self._state = row_program()(self._state, np.int32(0), self.row_state(RowChange(0, GREEDY, (), (), ())))
        self._copy([PageCopy(0, window, 0, count) for window, count in enumerate(self._layout.pages)])
        if self._config.lora is not None:
            self._write(SlotWeights(1, empty_factors(self._config, self._context.mesh)))
        jax.block_until_ready((self._pages, self._state))
        for key in self.programs:
            if key not in self._compiled:
                self._compiling[key] = self._narrow_compiler.submit(self._compile_later, *key)

    @property
    def num_compiling(self) -> int:
        """Number of programs that are still being compiled while steps run."""
        return sum(not future.done() for future in [*self._compiling.values()])

    def wait_compiled(self) -> None:
        """Wait until every program is compiled, for measurements of speed."""
        for future in [*self._compiling.values()]:
            future.result()

    def with_program(self, kind: str, step: EngineStep) -> EngineStep:
        """Return the step; with the widest page tables if the program for its own width is not compiled yet.

        kind: the kind of the step's program.
        """
        if step.is_scored or (kind, self.shape_of(step)) in self._compiled:
            return step
        return replace(step, width=self._layout.widths[-1])

    def is_compiled(self, step: EngineStep) -> bool:
        """Whether a scoring step can run. The first call starts to compile its program in a thread.

        Raises:
            Exception: the compiler's error.
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
        """Wait for the compiler threads, because Python cannot exit while they run."""
        for compiler in (self._narrow_compiler, self._compiler):
            compiler.shutdown(cancel_futures=True)

    @property
    def _arrays(self) -> _Arrays:
        draft = self._draft
        drafting = (draft.params, draft.pages) if draft is not None else ((), ())
        return _Arrays(self._params, self._pages, self._last, self._state, *drafting)

    def _lowered(self, kind: str, shape: Shape) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Yield the name and the lowered program of a step, and of the draft model in the same step.

        Programs are traced for abstract arrays, because steps that run meanwhile donate the real ones.
        """
        program = {"greedy": greedy_program, "sampling": sampling_program, "scoring": scoring_program}[kind]
        made = program(self._config, self._context.mesh, self._split, shape, self._dtype)
        packed, whole = np.zeros((shape.rows, shape.columns.width), np.int32), NamedSharding(self._mesh, P())
        targets, mask = np.zeros((shape.rows, shape.length), np.int32), None
        if kind == "sampling":
            mask = jax.ShapeDtypeStruct((shape.rows, shape.num_chosen, self.words), jnp.uint32, sharding=whole)
        work, drafts = Work(kind, shape, packed, mask, targets), None  # type: ignore
        if self._draft is not None:
            draft_kind = self._draft_kind(work)
            own = (self._draft.config, self._context.mesh, self._split, shape, self._draft.group, self._draft.dtype)
            yield (
                draft_kind,
                (draft_prefill_program if draft_kind == "prefill" else draft_program)(*own).lower(
                    *self._draft_arguments(work, self._abstract)
                ),
            )
            if draft_kind != "prefill":
                drafts = jax.ShapeDtypeStruct((shape.rows, shape.length - 1), jnp.int32, sharding=whole)
        yield kind, made.lower(*self._arguments(work, drafts, self._abstract))

    @staticmethod
    def _draft_kind(work: Work) -> str:
        """Return the name of the draft model's program in a step.

        It is a prefill of the same tokens, or computes draft tokens for the step to verify, greedily or by sampling.
        """
        return "prefill" if work.shape.num_chosen == 1 or work.kind == "scoring" else f"draft, {work.kind}"

    def _draft_arguments(self, work: Work, arrays: _Arrays) -> tuple[Any, ...]:
        if self._draft_kind(work) == "prefill":
            return (arrays.draft_params, arrays.draft_pages, work.packed)
        own = (arrays.state.samplers, arrays.state.seed) if work.kind == "sampling" else (None, None)
        return (arrays.draft_params, arrays.draft_pages, arrays.last, work.packed, *own)

    def _arguments(self, work: Work, drafts: Any, arrays: _Arrays) -> tuple[Any, ...]:
        first = (arrays.params, arrays.pages, arrays.last, work.packed)
        if work.kind == "scoring":
            return (*first, work.targets)
        if work.kind == "greedy":
            return (*first, drafts)
        own, mask = arrays.state, work.mask if work.mask is not None else self._free_mask(work.shape)
        return (*first, drafts, own.written, own.samplers, own.seed, own.bias, mask)

    def load_adapter(self, weights: SlotWeights) -> None:
        """Write an adapter into a slot, for all steps dispatched after this call.

        Raises:
            DeviceError: the write failed.
        """
        with device_errors():
            self.before_run(weights)
            self._write(weights)

    def _write(self, weights: SlotWeights) -> None:
        with jax.set_mesh(self._mesh):
            self._params = write_slot(self._params, weights, self._config, self._context)

    def run(self, work: Work) -> Result:
        """Dispatch a step; its results are not computed yet.

        Raises:
            DeviceError: a program failed. After any other exception nothing was dispatched.
        """
        changes = [(change.row, self.row_state(change)) for change in work.changes]
        program = self._compiled[work.kind, work.shape]
        with device_errors(), jax.set_mesh(self._mesh):
            self.before_run(work)
            for row, own in changes:
                self._state = row_program()(self._state, np.int32(row), own)
            if work.copies:
                self._copy(work.copies)
            drafts = None
            if self._draft is not None:
                draft_kind = self._draft_kind(work)
                made = self._compiled[draft_kind, work.shape](*self._draft_arguments(work, self._arrays))
                self._draft.pages, drafts = (made, None) if draft_kind == "prefill" else made
            made = program(*self._arguments(work, drafts, self._arrays))
            if work.kind == "scoring":
                self._pages, logprobs, hidden = made
                return Result(None, logprobs, hidden)
            self._pages, self._last, tokens, *rest = made
            if not rest:
                return Result(tokens, None, None)
            self._state = self._state._replace(written=rest[0])
            return Result(tokens, rest[1], None)

    def _free_mask(self, shape: Shape) -> Array:
        """Return a mask that allows all tokens, for a step of this shape. Masks are cached on the devices."""
        size = (shape.rows, shape.num_chosen)
        if size not in self._free_masks:
            mask = np.full((*size, self.words), 0xFFFFFFFF, np.uint32)
            whole = NamedSharding(self._mesh, P())
            # `jnp.full` would compile a program between two steps.
            self._free_masks[size] = jax.make_array_from_callback(mask.shape, whole, lambda index: mask[index])
        return self._free_masks[size]

    def row_state(self, change: RowChange) -> RowState:
        """Return the sampling state of a row as host arrays without the row dim."""
        vocab = self._vocab
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


def _limits(sampling: Sampling) -> np.ndarray:
    return np.array([getattr(sampling, name) for name in LIMITS], np.float32)
