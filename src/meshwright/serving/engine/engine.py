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

from meshwright.description.step.serving import ServingLayout
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import GREEDY
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.serving.engine.active_request import ActiveRequest, token_logprob
from meshwright.serving.engine.adapters import AdapterTable, Factors
from meshwright.serving.engine.checks import checked
from meshwright.serving.engine.constraints import ConstraintCompiler
from meshwright.serving.engine.decode_stats import DecodeStats, StepMeans, measured_and_planned
from meshwright.serving.engine.drafts import ModelDrafts, NgramDrafts
from meshwright.serving.engine.faults import DeviceError, device_errors, first_line, log_fault
from meshwright.serving.engine.inbox import Call, EngineInbox
from meshwright.serving.engine.layout import engine_layout
from meshwright.serving.engine.request import (
    Ending,
    Output,
    OutputCallback,
    OverloadedError,
    Request,
    TokenLogprob,
    UnknownAdapterError,
)
from meshwright.serving.engine.runner import Result, RowChange, Runner, Work
from meshwright.serving.engine.scheduler import EngineStep, Scheduler
from meshwright.serving.engine.sequence import TokenSequence
from meshwright.serving.engine.settings import EngineSettings
from meshwright.serving.engine.stats import Stats
from meshwright.serving.engine.step_arrays import mask_of, packed_inputs, targets_of

AHEAD = 1
"""Number of rounds in flight before the oldest is read; a round is a decode step, a chunk of prompts, or both."""


class Engine:
    """Answers requests with one model on its mesh; see `meshwright.serving.engine.request` for the interface.

    `on_failure` is called on the engine's thread, in the handler of the exception that ends the engine.

    Args:
        model: the model. On GPUs its parameters' arrays are deleted, because the engine stores them in other arrays.
        draft: a model on the same mesh that drafts `settings.num_drafts` tokens per step; None to draft from n-grams of
            the sequence.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings = EngineSettings(),  # noqa: B008
        draft: LoadedModel | None = None,
    ) -> None:
        self.settings = settings
        self.layout, self.context = engine_layout(model, settings)
        self.runner = Runner(model, self.layout, self.context, settings, draft)
        self.model = self.runner.model
        self.scheduler = self._new_scheduler()
        self.on_failure: Callable[[], None] = lambda: None
        self._changes = list[RowChange]()
        """Sampling options of rows, to be sent with the next step."""
        self._sampling_rows = set[int]()
        """Rows that need the sampling program because they are not greedy."""
        self._constraints = ConstraintCompiler(model.tokenizer)
        self._active = dict[str, ActiveRequest]()
        self._inbox = EngineInbox()
        self.adapters = AdapterTable(settings.with_slots(model.config), model.mesh_shape)
        self._numbers = itertools.count()
        self._rounds = deque[list[tuple[EngineStep, Result]]]()
        self._outputs = list[tuple[ActiveRequest, Output]]()
        self._num_steps = self._num_generated = 0
        self.decode_stats = DecodeStats()
        self._read_at: float | None = None  # When the last step's tokens were read; None if no other step was running.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.layout, on_admitted=self._on_admitted, can_score=self._is_compiled,
            on_error=lambda sequence, error: self._fail(sequence.request_id, error),
        )  # fmt: skip

    def _is_compiled(self, step: EngineStep) -> bool:
        """Whether a scoring step's program is compiled. If compiling fails, end all requests that need scoring."""
        try:
            return self.runner.is_compiled(step)
        except Exception as error:
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                if sequence.is_scored and sequence.done is None:
                    self._fail(sequence.request_id, error)
            return False

    def start(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile the first programs, then start the thread that answers requests; see `Runner.compile`."""
        self.runner.compile(on_program)
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join()
        self.runner.close()
        self._constraints.close()

    def submit(self, request: Request, deliver: OutputCallback) -> str:
        """Queue a request. Return its id; for the exceptions see `EngineClient`."""
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
            wanted = (request.constraint, request.stop_tokens, request.owner)
            active.matchers = [self._constraints.matcher(*wanted) for _ in range(request.num_completions)]
        if request.timeout_seconds is not None:
            active.deadline = monotonic() + request.timeout_seconds
        self._inbox.add(request_id, active, lambda: self._check_accepted(request))
        return request_id

    def _check_accepted(self, request: Request) -> None:
        """Raise if a request's adapter is no longer loaded, or the queue is full."""
        if request.adapter is not None and request.adapter not in self.adapters.by_name.values():
            raise UnknownAdapterError(f"the adapter {request.adapter.name!r} was unloaded")
        queued = len(self.scheduler.waiting)
        queued += sum(new.request.num_completions for new in self._inbox.requests)
        # Sequences that get a free row do not wait.
        free_rows = self.layout.shards * self.layout.rows - len(self.scheduler.running)
        if queued + request.num_completions > self.settings.max_queue + free_rows:
            raise OverloadedError(f"{queued} sequences wait; the queue takes {self.settings.max_queue}", 1.0)

    def load_adapter(self, name: str, factors: Factors) -> None:
        """Load an adapter that `adapters.read` has read, between two steps.

        Raises:
            MeshwrightError: no slot is free, or the name is in use.
        """

        def add() -> None:
            requests = (active.request for active in (*self._active.values(), *self._inbox.requests))
            in_use = [request.adapter for request in requests if request.adapter is not None]
            self.adapters.add(name, factors, in_use, self.runner.load_adapter)

        self._inbox.call(add)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; see `EngineClient`."""
        self._inbox.add(request_id, None)

    def stats(self) -> Stats:
        """Return the engine's state and totals."""
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
            uncompiled_programs=self.runner.num_compiling,
        )

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request."""
        return not (self._active or self._inbox or self._rounds or self._inbox.is_receiving)

    def _run(self) -> None:
        """Run the loop of the engine's thread: receive requests, run steps, deliver outputs."""
        try:
            while not self._inbox.is_closing:
                try:
                    self._receive_requests()
                    self._run_round()
                except DeviceError:
                    raise
                except Exception:
                    # No single request caused it: end all; later requests are answered.
                    message = log_fault(f"{len(self._active)} requests")
                    self._forget_steps()
                    for request_id in list(self._active):
                        self._end_request(request_id, "failed", message, is_scheduled=False)
                self._deliver()
        except BaseException as error:
            self.on_failure()
            self._inbox.failure = str(error) if isinstance(error, DeviceError) else first_line(error)
            self._forget_steps()
            self._end_all("failed", self._inbox.failure)
            raise
        self._end_all("aborted", "the server is shutting down")

    def _forget_steps(self) -> None:
        """Drop all dispatched steps; start again with a new scheduler and an empty prefix cache."""
        counters = self.scheduler.counters
        self.scheduler = self._new_scheduler()
        self.scheduler.counters = counters
        self._rounds.clear()
        for active in self._active.values():
            for sequence in active.sequences:
                sequence.row, sequence.pages = None, []

    def _fail(self, request_id: str, error: Exception) -> None:
        """End the request that caused `error`, the exception being handled; raise it if it is a `DeviceError`."""
        if isinstance(error, DeviceError):
            raise error
        if isinstance(error, MeshwrightError):
            self._end_request(request_id, "refused", str(error))
        else:
            self._end_request(request_id, "failed", log_fault(f"request {request_id}"))

    def _receive_requests(self) -> None:
        """Empty the inbox: start requests, call functions, abort requests. End requests past their deadline."""
        for _ in range(self._inbox.num_received(is_idle=not (self._rounds or self._active))):
            request_id, item = self._inbox.pop()
            if item is None:
                self._end_request(request_id, "aborted")
            elif isinstance(item, Call):
                item.run()
            else:
                try:
                    self._start_request(request_id, item)
                except Exception as error:
                    self._fail(request_id, error)
        now = monotonic()
        for request_id, active in list(self._active.items()):
            if active.deadline is not None and now > active.deadline:
                self._end_request(request_id, "aborted", "the time of the request is over")
        self._inbox.is_receiving = False

    def _start_request(self, request_id: str, active: ActiveRequest) -> None:
        request = active.request
        is_scored = request.prompt_logprobs is not None or request.pooled
        if request.max_tokens == 0 and not is_scored:
            self._end_others(active, "length")
            return
        self._active[request_id] = active
        active.begin(request_id, self._numbers, self.model.tokenizer, self.runner.words, is_scored=is_scored)
        for sequence in active.sequences:
            if sequence.matcher is not None:
                self._update_mask(active, sequence)
            elif self.settings.num_drafts:
                sequence.drafts = ModelDrafts() if self.runner.has_draft else NgramDrafts(request.prompt)
            if sequence.done is None:
                self.scheduler.add(sequence)

    def _update_mask(self, active: ActiveRequest, sequence: TokenSequence) -> None:
        """Compute the mask of a constrained sequence's next token; end the sequence if no token is allowed."""
        assert sequence.matcher is not None
        mask = np.zeros(self.runner.words, np.uint32)
        if sequence.matcher.mask(mask, stops=sequence.num_generated >= sequence.request.min_tokens):
            sequence.mask = mask
            return
        sequence.done = "token"
        self.scheduler.end(sequence)
        self._add_output(active, Output(completion=sequence.number, done=sequence.done))
        self._remove_if_done(sequence.request_id, active)

    def _on_admitted(self, sequence: TokenSequence) -> None:
        """Queue the sampling options of a sequence's new row, unless the row was greedy before and still is."""
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
        """Dispatch a round (the steps of `Scheduler.steps`), and read the results of the oldest round in flight."""
        steps = [found for step in self.scheduler.steps() if (found := self._dispatch(step)) is not None]
        self._num_steps += len(steps)
        if steps:
            self._rounds.append(steps)
        elif not self._rounds and any(sequence.is_scored for sequence in self.scheduler.running):
            # Nothing to do until the scoring program is compiled.
            self._inbox.wait(0.05)
        if self._rounds and (len(self._rounds) > AHEAD or not steps):
            oldest = self._rounds.popleft()
            for step, result in oldest:
                self._read(step, result)
            now = monotonic()
            if self._read_at is not None and len(oldest) == 1 and not oldest[0][0].is_chunk:
                starts = [part.start for part in oldest[0][0].slices]
                self.decode_stats.add_step(starts, now - self._read_at, self.layout.page_size)
            self._read_at = now if self._rounds else None

    def _dispatch(self, step: EngineStep) -> tuple[EngineStep, Result] | None:
        """Dispatch a step; return it with its results on the devices.

        Requests whose input cannot be built are ended and left out. None if no sequence is left.
        """
        try:
            result = self.runner.run(self._work_of(step))
        except DeviceError:
            raise
        except Exception:
            left = self._without_faults(step)
            if len(left.slices) == len(step.slices):
                raise
            if not left.slices:  # Queue its page copies again: they may belong to other sequences.
                self.scheduler.put_back(left.copies)
                return None
            return self._dispatch(left)
        self._changes.clear()
        with device_errors():
            for array in jax.tree.leaves(result if step.has_logprobs else result._replace(logprobs=None)):
                array.copy_to_host_async()
        return step, result

    def _without_faults(self, step: EngineStep) -> EngineStep:
        """End the requests whose input cannot be built even for a step of their own; return the step without them."""
        self.scheduler.put_back(step.copies)
        for change in list(self._changes):
            try:
                self.runner.row_state(change)
            except Exception as error:
                self._changes.remove(change)
                self._sampling_rows.add(change.row)  # The devices still have an earlier request's options.
                for sequence in [each for each in self.scheduler.running if each.row == change.row]:
                    self._fail(sequence.request_id, error)
        for part in step.slices:
            if part.sequence.done is None:
                try:
                    self._work_of(replace(step, slices=[part]))
                except Exception as error:
                    self._fail(part.sequence.request_id, error)
        left = [part for part in step.slices if part.sequence.done is None]
        return replace(step, slices=left, copies=self.scheduler.pop_copies())

    def means(self) -> tuple[StepMeans, StepMeans] | None:
        """Return the measured and the predicted means of decode steps; see `measured_and_planned`."""
        layout = ServingLayout(self.model.mesh_shape, self.context.cache_split or "heads")
        return measured_and_planned(self.decode_stats, self.model, self.settings, self.layout, layout)

    def _work_of(self, step: EngineStep) -> Work:
        """Return the input of a step: its arrays, and the kind and shape of its program."""
        needs_sampling = any(
            part.is_chosen and (part.row in self._sampling_rows or part.sequence.needs_sampling_program)
            for part in step.slices
        )
        kind = "scoring" if step.is_scored else "sampling" if needs_sampling or step.is_chunk else "greedy"
        step = self.runner.with_program(kind, step)
        shape = self.runner.shape_of(step)
        return Work(
            kind,
            shape,
            packed_inputs(step, shape, self.scheduler.tables(step), self.layout.shards * self.layout.rows),
            mask_of(step, shape, self.runner.words) if kind == "sampling" else None,
            targets_of(step, shape) if step.is_scored else None,
            tuple(step.copies),
            tuple(self._changes),
        )

    def _read(self, step: EngineStep, result: Result) -> None:
        """Wait for a step's tokens, and add them to their sequences."""
        if step.is_scored:
            self._read_scores(step, result)
            return
        assert result.made is not None
        with device_errors():
            made = np.asarray(result.made)
            logprobs = [*map(np.asarray, result.logprobs)] if result.logprobs and step.has_logprobs else None
        for part in step.slices:
            if not part.is_chosen:
                continue
            sequence = part.sequence
            tokens = [token for token in made[part.at].tolist() if token >= 0]
            self.scheduler.append_tokens(sequence, tokens)
            self._num_generated += len(tokens)
            if sequence.done is not None:
                continue
            try:
                found = ()
                if logprobs is not None and sequence.request.logprobs is not None:
                    found = tuple(
                        token_logprob(token, [array[part.at, place] for array in logprobs], sequence.request.logprobs)
                        for place, token in enumerate(tokens)
                    )
                self._append_tokens(sequence, tokens, found)
            except Exception as error:
                self._fail(sequence.request_id, error)

    def _append_tokens(self, sequence: TokenSequence, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Detokenize new tokens of a sequence, up to the token that ends it, and queue an output."""
        active = self._active[sequence.request_id]
        before = sequence.num_generated - sequence.in_flight - len(tokens)
        self.decode_stats.generated_tokens += len(tokens)
        if not before:
            self.decode_stats.firsts += 1
            self.decode_stats.first_seconds += monotonic() - sequence.submitted
            self.decode_stats.prompt_tokens += len(sequence.request.prompt)
        kept, text = active.grow(sequence, tokens, before)
        if sequence.done:
            self.scheduler.end(sequence)
        self._add_output(active, active.output(sequence, tuple(kept), text, tuple(logprobs[: len(kept)])))
        if sequence.drafts is not None:
            sequence.drafts.extend(kept)
        if sequence.matcher is not None and sequence.done is None:
            for token in kept:
                sequence.matcher.accept(token)
            self._update_mask(active, sequence)
        self._remove_if_done(sequence.request_id, active)

    def _read_scores(self, step: EngineStep, result: Result) -> None:
        """Wait for the results of a scoring step, and add them to their requests."""
        assert result.logprobs is not None
        assert result.hidden is not None
        with device_errors():
            arrays, hidden = [np.asarray(array) for array in result.logprobs], np.asarray(result.hidden)
        for part in step.slices:
            sequence, active = part.sequence, self._active.get(part.sequence.request_id)
            if sequence.done is not None or active is None:
                continue
            try:
                active.add_scores(part, [array[part.at] for array in arrays], hidden[part.at])
                if part.start + len(part.tokens) == len(active.request.prompt) and not active.request.max_tokens:
                    sequence.done = "length"
                    self.scheduler.end(sequence)
                    self._add_output(active, active.output(sequence, (), "", ()))
                    self._end_others(active, "length")
                    self._remove_if_done(sequence.request_id, active)
            except Exception as error:
                self._fail(sequence.request_id, error)

    def _remove_if_done(self, request_id: str, active: ActiveRequest) -> None:
        if all(sequence.done for sequence in active.sequences):
            self._active.pop(request_id, None)

    def _end_others(self, active: ActiveRequest, done: Ending, error: str = "") -> None:
        """Report the end of completions without a sequence: with `max_tokens` 0, the prompt is computed only once."""
        for number in range(len(active.sequences), active.request.num_completions):
            self._add_output(active, Output(completion=number, done=done, error=error))

    def _end_request(self, request_id: str, done: Ending, error: str = "", *, is_scheduled: bool = True) -> None:
        """End a request, and report the end of its completions that have not ended.

        Args:
            request_id: the request; nothing happens if it has ended.
            done: why it ends.
            error: message for the client.
            is_scheduled: whether the scheduler still has the sequences.
        """
        if (active := self._active.get(request_id)) is None:
            return
        for sequence in active.sequences:
            if sequence.number not in active.ended:
                if is_scheduled:
                    self.scheduler.end(sequence)
                sequence.done = done
                self._add_output(active, Output(completion=sequence.number, done=done, error=error))
        self._end_others(active, done, error)
        self._active.pop(request_id, None)

    def _add_output(self, active: ActiveRequest, output: Output) -> None:
        self._outputs.append((active, output))
        if output.done:
            active.ended.add(output.completion)

    def _end_all(self, done: Ending, error: str) -> None:
        for active in self._inbox.pop_all(error):
            self._end_others(active, done, error)
        for request_id in list(self._active):
            self._end_request(request_id, done, error, is_scheduled=False)
        self._deliver()

    def _deliver(self) -> None:
        """Hand the queued outputs to their requests' callbacks."""
        outputs, self._outputs = self._outputs, []
        for active, group in itertools.groupby(outputs, key=lambda pair: pair[0]):
            try:
                active.deliver([output for _, output in group])
            except Exception:  # The client cannot be reached.
                log_fault("the delivery of a request's outputs")
                self._end_request(active.request_id, "aborted")
