"""The engine: an asynchronous loop of steps on one thread, from requests to their outputs.

Step n + 1 is dispatched before the tokens of step n are read, so that the devices never wait for Python: each row's
newest token stays on the devices. A sequence that ended in step n still has a row in step n + 1; its token is dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import jax
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.inference import LoadedModel
from meshwright.inference.stream import GrowingText
from meshwright.models import GREEDY
from meshwright.serving.active_request import ActiveRequest
from meshwright.serving.checks import checked
from meshwright.serving.constraints import ConstraintCompiler, Matcher
from meshwright.serving.decode_stats import DecodeStats, StepMeans, measured_and_planned
from meshwright.serving.draft_programs import why_not_draft
from meshwright.serving.drafts import ModelDrafts, NgramDrafts
from meshwright.serving.layout import engine_layout
from meshwright.serving.numbers import mask_of, numbers_of, targets_of
from meshwright.serving.request import (
    ClosedError,
    Ending,
    Output,
    OutputCallback,
    OverloadedError,
    Request,
    TokenLogprob,
)
from meshwright.serving.runner import Result, RowChange, Runner, Work
from meshwright.serving.scheduler import Scheduler, Step
from meshwright.serving.sequence import TokenSequence
from meshwright.serving.settings import EngineSettings
from meshwright.serving.stats import Stats
from meshwright.step import Serving, ServingLayout
from meshwright.step.serve import page_parts
from meshwright.text import TokenStream

PAUSE_SECONDS, MOST_SECONDS = 0.004, 0.02
"""An engine with nothing to do begins once no request came for so long, or at the latest after so long: requests that
come together are read together."""

AHEAD = 1
"""Rounds of steps that are dispatched before the oldest is read."""


class Engine:
    """Answers requests from one model; see `meshwright.serving.request`.

    Args:
        model: whose mesh it runs on. settings: how. draft: a model on the same mesh that drafts `num_drafts` tokens a
            step, in place of n-grams of the sequence.

    compiling: the thread that compiles, once the engine has started, what it could begin without.
    on_failure: called, in the engine's thread, while the exception is handled that ends it.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings = EngineSettings(),  # noqa: B008
        draft: LoadedModel | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        if draft is not None and (reason := why_not_draft(draft.config, model.config)):
            raise MeshwrightError(f"{draft.config.name} cannot draft for {model.config.name}: {reason}")
        if draft is not None and not settings.num_drafts:
            raise MeshwrightError(f"{draft.config.name} is the draft model, and num_drafts is 0; use 1 to 16")
        self._has_draft_model = draft is not None
        self.layout, self.context = engine_layout(model, settings)
        self.runner = Runner(model, self.layout, self.context, settings, draft)
        if settings.weight_dtype is not None:
            # The runner has its own; those that were loaded are not kept for it.
            self.model = replace(model, params={})
        self.scheduler = Scheduler(self.layout, on_admitted=self._on_admitted)
        self.on_failure: Callable[[], None] = lambda: None
        self._changes = list[RowChange]()
        self._sampling_rows = set[int]()
        """Rows whose tokens are not chosen as the likeliest ones are."""
        self._constraints: ConstraintCompiler | None = None
        """Made for the first request that has a constraint: it reads the whole vocabulary."""
        self._constraints_lock = threading.Lock()
        self._active = dict[str, ActiveRequest]()
        self._inbox = deque[tuple[str, ActiveRequest | None]]()
        self._wakeup = threading.Condition()
        self._numbers = itertools.count()
        self._rounds = deque[list[tuple[Step, Result]]]()
        self._outputs = list[tuple[ActiveRequest, Output]]()
        self._is_closing, self._failure = False, ""
        self._num_steps = self._num_generated = 0
        self.decode_stats = DecodeStats()
        self._read_at: float | None = None
        """When the tokens of the last step were read, if another step was on its way by then."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.compiling = threading.Thread(target=self._compile_rest, name="compiling", daemon=True)
        self._compile_error: BaseException | None = None
        self._unscored = dict[str, ActiveRequest]()
        """Requests that wait until the programs for scoring are compiled."""

    def start(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile the programs to begin with, then answer requests, while the other programs are compiled.

        on_program: called with how many are compiled, of how many.
        """
        self.runner.compile(on_program)
        self._thread.start()
        self.compiling.start()

    def close(self) -> None:
        """End all requests and the thread."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        for thread in (self._thread, self.compiling):
            if thread.is_alive():
                thread.join()
        if self._constraints is not None:
            self._constraints.close()

    def submit(self, request: Request, deliver: OutputCallback) -> str:
        """Queue a request; see `EngineClient`."""
        request = checked(request, self.model, self.layout.context)
        number = next(self._numbers)
        request_id = f"{number:08x}"
        limit = self.settings.max_queue + self.layout.shards * self.layout.rows
        if request.num_completions > limit:
            raise MeshwrightError(
                f"num_completions is {request.num_completions}; rows and queue of this engine have room for {limit}"
            )
        active = ActiveRequest(request, deliver)
        if request.constraint is not None:
            active.matchers = [self._matcher(request) for _ in range(request.num_completions)]
        if request.timeout_seconds is not None:
            active.deadline = monotonic() + request.timeout_seconds
        with self._wakeup:
            if self._failure:
                raise ClosedError(f"the engine has failed: {self._failure}")
            if self._is_closing:
                raise ClosedError("the engine is shutting down")
            queued = len(self.scheduler.waiting)
            queued += sum(new.request.num_completions for _, new in self._inbox if new is not None)
            # Sequences for which a row is free do not wait.
            free_rows = self.layout.shards * self.layout.rows - len(self.scheduler.running)
            if queued + request.num_completions > self.settings.max_queue + free_rows:
                raise OverloadedError(f"{queued} sequences wait; the queue takes {self.settings.max_queue}", 1.0)
            self._inbox.append((request_id, active))
            self._wakeup.notify()
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; see `EngineClient`."""
        with self._wakeup:
            self._inbox.append((request_id, None))
            self._wakeup.notify()

    def stats(self) -> Stats:
        """The engine now, and what it has done so far."""
        scheduler = self.scheduler
        return Stats(
            queued=len(scheduler.waiting) + len(self._inbox),
            running=len(scheduler.running),
            num_pages=scheduler.num_pages,
            used_pages=scheduler.num_pages - scheduler.num_free_pages,
            computed_tokens=scheduler.counters.prompt_tokens,
            prefix_hit_tokens=scheduler.counters.cached_tokens,
            generated_tokens=self._num_generated,
            preemptions=scheduler.counters.preempted,
            num_steps=self._num_steps,
            uncompiled_programs=self.runner.num_uncompiled,
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, so that no step is taken."""
        return not (self._active or self._inbox or self._rounds or self._unscored)

    def _matcher(self, request: Request) -> Matcher:
        """A new matcher for a constrained sequence."""
        assert request.constraint is not None
        if self.model.tokenizer is None:
            raise MeshwrightError(
                f"{self.model.config.name} has no tokenizer, so that no sequence of it can be constrained"
            )
        with self._constraints_lock:
            self._constraints = self._constraints or ConstraintCompiler(self.model.tokenizer)
        return self._constraints.matcher(request.constraint, request.stop_tokens)

    def _compile_rest(self) -> None:
        """Compile the programs that the engine began without; a program that cannot be compiled ends the engine."""
        try:
            self.runner.compile_rest(lambda: self._is_closing, self._queue_unscored)
        except BaseException as error:
            self._compile_error = error
            self._queue_unscored()

    def _queue_unscored(self) -> None:
        with self._wakeup:
            self._inbox.extend(self._unscored.items())
            self._unscored.clear()
            self._wakeup.notify()

    def _run(self) -> None:
        """The engine thread's loop: take requests, run steps, deliver outputs."""
        try:
            while self._receive_requests():
                self._run_round()
                self._deliver()
        except BaseException as error:
            self.on_failure()
            with self._wakeup:
                self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._end_all("failed", self._failure)
            raise
        self._end_all("aborted", "the server is shutting down")

    def _receive_requests(self) -> bool:
        """Start new requests, and end those that are aborted or past their deadline; False once the engine closes."""
        with self._wakeup:
            if not (self._rounds or self._active):
                self._wakeup.wait_for(lambda: self._inbox or self._is_closing or self._compile_error)
                latest, seen = monotonic() + MOST_SECONDS, 0
                while seen < len(self._inbox) and monotonic() < latest:
                    seen = len(self._inbox)
                    self._wakeup.wait_for(lambda: len(self._inbox) > seen or self._is_closing, PAUSE_SECONDS)  # noqa: B023
            if self._is_closing:
                return False
            if self._compile_error is not None:
                raise self._compile_error
            received, self._inbox = self._inbox, deque()
        for request_id, active in received:
            if active is None:
                self._end_request(request_id, "aborted")
            else:
                self._start_request(request_id, active)
        now = monotonic()
        for request_id, active in [*self._active.items(), *self._unscored.items()]:
            if active.deadline is not None and now > active.deadline:
                self._end_request(request_id, "aborted", "the time of the request is over")
        return True

    def _start_request(self, request_id: str, active: ActiveRequest) -> None:
        request = active.request
        is_scored = request.prompt_logprobs is not None or request.pooled
        if request.max_tokens == 0 and not is_scored:
            for number in range(request.num_completions):
                self._outputs.append((active, Output(completion=number, done="length")))
            return
        with self._wakeup:
            if is_scored and not self.runner.can_score:
                self._unscored[request_id] = active
                return
        self._active[request_id] = active
        first = None
        for number in range(request.num_completions if request.max_tokens else 1):
            own = replace(request, sampling=replace(request.sampling, seed=(request.sampling.seed + number) % 2**32))
            sequence = TokenSequence(request_id, number, own, list(request.prompt), next(self._numbers), first)
            sequence.is_scored = is_scored and number == 0
            first = first or sequence
            active.sequences.append(sequence)
            tokenizer = self.model.tokenizer
            skip = request.skip_special_tokens
            active.growing[number] = GrowingText(
                TokenStream(tokenizer, skip_special_tokens=skip) if tokenizer else None
            )
            if active.matchers:
                sequence.matcher = active.matchers[number]
                self._update_mask(active, sequence)
            elif self.settings.num_drafts:
                sequence.drafts = ModelDrafts() if self._has_draft_model else NgramDrafts(request.prompt)
            if sequence.done is None:
                self.scheduler.add(sequence)

    def _update_mask(self, active: ActiveRequest, sequence: TokenSequence) -> None:
        """Compute the mask of a constrained sequence's next token; end the sequence if no token is allowed."""
        assert sequence.matcher is not None
        mask, error = np.zeros(self.runner.words, np.uint32), ""
        try:
            if sequence.matcher.mask(mask, stops=sequence.num_generated >= sequence.request.min_tokens):
                sequence.mask = mask
                return
            sequence.done = "token"
        except MeshwrightError as found:
            sequence.done, error = "failed", str(found)
        self.scheduler.end(sequence)
        self._outputs.append((active, Output(completion=sequence.number, done=sequence.done, error=error)))
        self._remove_if_done(sequence.request_id, active)

    def _on_admitted(self, sequence: TokenSequence) -> None:
        """Queue the sampling parameters of a row, unless the row is greedy and stays so."""
        assert sequence.row is not None
        request = sequence.request
        needs_sampling = replace(request.sampling, seed=0) != GREEDY or bool(request.logit_bias)
        if needs_sampling or sequence.row in self._sampling_rows:
            length = len(request.prompt)
            self._changes.append(
                RowChange(sequence.row, request.sampling, request.prompt, sequence.tokens[length:], request.logit_bias)
            )
            (self._sampling_rows.add if needs_sampling else self._sampling_rows.discard)(sequence.row)

    def _run_round(self) -> None:
        """Dispatch the next steps, and read the oldest that are on their way."""
        steps = [(step, self.runner.run(self._work_of(step))) for step in self.scheduler.steps()]
        for step, result in steps:
            for array in jax.tree.leaves(result if _has_logprobs(step) else result._replace(logprobs=None)):
                array.copy_to_host_async()
        self._num_steps += len(steps)
        if steps:
            self._rounds.append(steps)
        if self._rounds and (len(self._rounds) > AHEAD or not steps):
            oldest = self._rounds.popleft()
            for step, result in oldest:
                self._read(step, result)
            now = monotonic()
            if self._read_at is not None and len(oldest) == 1 and not oldest[0][0].is_chunk:
                self._record_decode_step(oldest[0][0], now - self._read_at)
            self._read_at = now if self._rounds else None

    def _record_decode_step(self, step: Step, seconds: float) -> None:
        """Add a decode step that directly followed another one to the statistics."""
        decode_stats, size = self.decode_stats, self.layout.page_size
        decode_stats.steps += 1
        decode_stats.seconds += seconds
        decode_stats.sequences += len(step.slices)
        decode_stats.cached += sum((part.start // size + 1) * size for part in step.slices)

    def means(self) -> tuple[StepMeans, StepMeans] | None:
        """What is measured of steps and what is planned; see `measured_and_planned`."""
        dtype, settings, config = self.model.dtype, self.settings, self.model.config
        assert self.context.cache_split is not None
        layout = ServingLayout(self.model.mesh_shape, self.context.cache_split)
        serving = Serving(
            model=config, prompt_len=1, output_len=1, page_size=self.layout.page_size // page_parts(config, layout),
            weight_dtype=settings.weight_dtype or dtype, kv_dtype=settings.kv_dtype or dtype, compute_dtype=dtype,
        )  # fmt: skip
        return measured_and_planned(self.decode_stats, serving, layout, self.model.system, self.layout.chunks[0][1])

    def _work_of(self, step: Step) -> Work:
        """The arrays of a step, and the program that runs it."""
        needs_sampling = any(part.is_chosen and self._needs_sampling_program(part.sequence) for part in step.slices)
        kind = "scoring" if step.is_scored else "sampling" if needs_sampling or step.is_chunk else "greedy"
        if not self.runner.is_compiled(kind, self.runner.shape_of(step)):
            step = replace(step, width=self.layout.widths[-1])
        shape = self.runner.shape_of(step)
        changes, self._changes = tuple(self._changes), []
        return Work(
            kind,
            shape,
            numbers_of(step, shape, self.scheduler.tables(step), self.layout.shards * self.layout.rows),
            mask_of(step, shape, self.runner.words) if kind == "sampling" else None,
            targets_of(step, shape) if step.is_scored else None,
            tuple(step.copies),
            changes,
        )

    def _needs_sampling_program(self, sequence: TokenSequence) -> bool:
        request = sequence.request
        return (
            sequence.row in self._sampling_rows
            or request.logprobs is not None
            or sequence.mask is not None
            or sequence.num_generated - 1 < request.min_tokens
        )

    def _read(self, step: Step, result: Result) -> None:
        """Wait for a step's tokens, and add them to their sequences."""
        if step.is_scored:
            self._read_scores(step, result)
            return
        assert result.made is not None
        made = np.asarray(result.made)
        logprobs = [np.asarray(array) for array in result.logprobs] if result.logprobs and _has_logprobs(step) else None
        for part in step.slices:
            if not part.is_chosen:
                continue
            sequence = part.sequence
            tokens = [token for token in made[part.at].tolist() if token >= 0]
            self.scheduler.append_tokens(sequence, tokens)
            self._num_generated += len(tokens)
            if sequence.done is not None:
                continue
            found = ()
            if logprobs is not None and sequence.request.logprobs is not None:
                found = tuple(
                    _token_logprob(token, [array[part.at, place] for array in logprobs], sequence.request.logprobs)
                    for place, token in enumerate(tokens)
                )
            self._append_tokens(sequence, tokens, found)

    def _append_tokens(self, sequence: TokenSequence, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Detokenize new tokens of a sequence, up to the one that ends it, and queue them as an output."""
        active = self._active[sequence.request_id]
        request, growing = sequence.request, active.growing[sequence.number]
        before, pieces, kept = sequence.num_generated - sequence.in_flight - len(tokens), "", list[int]()
        self.decode_stats.generated_tokens += len(tokens)
        if not before:
            self.decode_stats.firsts += 1
            self.decode_stats.first_seconds += monotonic() - sequence.submitted
            self.decode_stats.prompt_tokens += len(request.prompt)
        for number, token in enumerate(tokens, start=before + 1):
            pieces += growing.add(token, request.stop_tokens, request.stop, is_last=number >= request.max_tokens)
            if growing.done != "token":
                kept.append(token)
            if growing.done:
                break
        sequence.done = growing.done
        if sequence.done:
            self.scheduler.end(sequence)
        self._outputs.append((active, active.output(sequence, tuple(kept), pieces, tuple(logprobs[: len(kept)]))))
        if sequence.drafts is not None:
            sequence.drafts.extend(kept)
        if sequence.matcher is not None and sequence.done is None:
            for token in kept:
                sequence.matcher.accept(token)
            self._update_mask(active, sequence)
        self._remove_if_done(sequence.request_id, active)

    def _read_scores(self, step: Step, result: Result) -> None:
        """Wait for the log probabilities and hidden states of prompt chunks."""
        assert result.logprobs is not None
        assert result.hidden is not None
        arrays, hidden = [np.asarray(array) for array in result.logprobs], np.asarray(result.hidden)
        for part in step.slices:
            sequence, active = part.sequence, self._active.get(part.sequence.request_id)
            if sequence.done is not None or active is None:
                continue
            request, end = active.request, part.start + len(part.tokens)
            active.hidden[part.start] = hidden[part.at]
            if request.prompt_logprobs is not None:
                for place, position in enumerate(range(part.start + 1, min(end + 1, len(request.prompt)))):
                    own = [array[part.at, place] for array in arrays]
                    active.logprobs[position] = _token_logprob(request.prompt[position], own, request.prompt_logprobs)
            if end == len(request.prompt) and not request.max_tokens:
                sequence.done = "length"
                self.scheduler.end(sequence)
                self._outputs.append((active, active.output(sequence, (), "", ())))
                self._end_others(active, "length")
                self._remove_if_done(sequence.request_id, active)

    def _remove_if_done(self, request_id: str, active: ActiveRequest) -> None:
        if all(sequence.done for sequence in active.sequences):
            self._active.pop(request_id, None)

    def _end_others(self, active: ActiveRequest, done: Ending, error: str = "") -> None:
        """End the sequences of a scoring request that were never started: its prompt is computed once."""
        for number in range(len(active.sequences), active.request.num_completions):
            self._outputs.append((active, Output(completion=number, done=done, error=error)))

    def _end_request(self, request_id: str, done: Ending, error: str = "") -> None:
        active = self._active.pop(request_id, None) or self._unscored.pop(request_id, None)
        if active is None:
            return
        for sequence in active.sequences:
            if sequence.done is None:
                sequence.done = done
                self.scheduler.end(sequence)
                self._outputs.append((active, Output(completion=sequence.number, done=done, error=error)))
        self._end_others(active, done, error)

    def _end_all(self, done: Ending, error: str) -> None:
        with self._wakeup:
            received, self._inbox = self._inbox, deque()
        for active in (active for _, active in received if active is not None):
            completions = range(active.request.num_completions)
            active.deliver([Output(completion=number, done=done, error=error) for number in completions])
        for request_id in [*self._active, *self._unscored]:
            self._end_request(request_id, done, error)
        self._deliver()

    def _deliver(self) -> None:
        """Hand the queued outputs to their requests' callbacks."""
        outputs, self._outputs = self._outputs, []
        for active, group in itertools.groupby(outputs, key=lambda pair: pair[0]):
            active.deliver([output for _, output in group])


def _has_logprobs(step: Step) -> bool:
    return step.is_scored or any(part.sequence.request.logprobs is not None for part in step.slices)


def _token_logprob(token: int, arrays: Sequence[np.ndarray], count: int) -> TokenLogprob:
    """Of one token, from its own log probability, and the values and tokens of the likeliest."""
    own, values, tokens = arrays
    return TokenLogprob(token, float(own), tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)))
