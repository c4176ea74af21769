"""The engine: requests in, texts out, a step after another on a thread of its own.

A step is dispatched before the tokens of the one before it are read, so that the devices never wait for Python: what a
row takes next it takes from where the last step left it, on the devices. A text that has ended by then is in one step
too many, whose token is left out.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import jax
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.inference import LoadedModel
from meshwright.inference.stream import GrowingText
from meshwright.models import GREEDY
from meshwright.serving.checks import checked
from meshwright.serving.constraints import ConstraintCompiler, Matcher
from meshwright.serving.draft_programs import why_not_draft
from meshwright.serving.drafts import ModelDrafts, NgramDrafts
from meshwright.serving.layout import engine_layout
from meshwright.serving.numbers import mask_of, numbers_of, targets_of
from meshwright.serving.pace import Means, Pace, measured_and_planned
from meshwright.serving.request import (
    ClosedError,
    Deliver,
    Ending,
    Output,
    OverloadedError,
    Request,
    TokenLogprob,
)
from meshwright.serving.runner import Result, RowChange, Runner, Work
from meshwright.serving.scheduler import Scheduler, Step
from meshwright.serving.settings import EngineSettings
from meshwright.serving.stats import Stats
from meshwright.serving.text import Text
from meshwright.step import Serving, ServingLayout
from meshwright.step.serve import page_parts
from meshwright.text import TokenStream

PAUSE_SECONDS, MOST_SECONDS = 0.004, 0.02
"""An engine with nothing to do begins once no request came for so long, or at the latest after so long: requests that
come together are read together."""

AHEAD = 1
"""Rounds of steps that are dispatched before the oldest is read."""


@dataclass(eq=False)
class _Asked:
    """A request in the engine: its texts, what each has written, and what its prompt was found to be."""

    request: Request
    deliver: Deliver
    texts: list[Text] = field(default_factory=list)
    growing: dict[int, GrowingText] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """Of the prompt's tokens, by position."""
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    """The sums of hidden states of chunks, by the position of their first token."""
    matchers: list[Matcher] = field(default_factory=list)
    """Of the texts, where they are constrained."""
    deadline: float | None = None


class Engine:
    """Answers requests from one model; see `meshwright.serving.request`.

    Args:
        model: whose mesh it runs on. settings: how. draft: a model on the same mesh that guesses `num_drafts` tokens a
            step, in place of what the text had before.

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
            raise MeshwrightError(f"{draft.config.name} cannot guess for {model.config.name}: {reason}")
        if draft is not None and not settings.num_drafts:
            raise MeshwrightError(f"{draft.config.name} is to guess, and num_drafts is 0; use 1 to 16")
        self._has_draft_model = draft is not None
        self.layout, self.context = engine_layout(model, settings)
        self.runner = Runner(model, self.layout, self.context, settings, draft)
        if settings.weight_dtype is not None:
            # The runner has its own; those that were loaded are not kept for it.
            self.model = replace(model, params={})
        self.scheduler = Scheduler(self.layout, on_admitted=self._admitted)
        self.on_failure: Callable[[], None] = lambda: None
        self._changes = list[RowChange]()
        self._special_rows = set[int]()
        """Rows whose tokens are not chosen as the likeliest ones are."""
        self._constraints: ConstraintCompiler | None = None
        """Made for the first request that has a constraint: it reads the whole vocabulary."""
        self._constraints_lock = threading.Lock()
        self._asked = dict[str, _Asked]()
        self._inbox = deque[tuple[str, _Asked | None]]()
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._rounds = deque[list[tuple[Step, Result]]]()
        self._outputs = list[tuple[_Asked, Output]]()
        self._is_closing, self._failure = False, ""
        self._num_steps = self._num_generated = 0
        self.pace = Pace()
        self._read_at: float | None = None
        """When the tokens of the last step were read, if another step was on its way by then."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, on_program: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile every program, then answer requests. on_program: called with how many are compiled, of how many."""
        self.runner.compile(on_program)
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._constraints is not None:
            self._constraints.close()

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request; see `Serves`."""
        request = checked(request, self.model, self.layout.context)
        number = next(self._numbers)
        request_id = f"{number:08x}"
        most = self.settings.max_queue + self.layout.shards * self.layout.rows
        if request.num_texts > most:
            raise MeshwrightError(
                f"num_texts is {request.num_texts}; rows and queue of this engine have room for {most}"
            )
        asked = _Asked(request, deliver)
        if request.constraint is not None:
            asked.matchers = [self._matcher(request) for _ in range(request.num_texts)]
        if request.timeout_seconds is not None:
            asked.deadline = monotonic() + request.timeout_seconds
        with self._news:
            if self._failure:
                raise ClosedError(f"the engine has failed: {self._failure}")
            if self._is_closing:
                raise ClosedError("the engine is shutting down")
            queued = len(self.scheduler.waiting)
            queued += sum(news.request.num_texts for _, news in self._inbox if news is not None)
            # Texts for which a row is free do not wait.
            free_rows = self.layout.shards * self.layout.rows - len(self.scheduler.running)
            if queued + request.num_texts > self.settings.max_queue + free_rows:
                raise OverloadedError(f"{queued} texts wait; the queue takes {self.settings.max_queue}", 1.0)
            self._inbox.append((request_id, asked))
            self._news.notify()
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; see `Serves`."""
        with self._news:
            self._inbox.append((request_id, None))
            self._news.notify()

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
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, so that no step is taken."""
        return not (self._asked or self._inbox or self._rounds)

    def _matcher(self, request: Request) -> Matcher:
        """The state of a constrained text that begins."""
        assert request.constraint is not None
        if self.model.tokenizer is None:
            raise MeshwrightError(
                f"{self.model.config.name} has no tokenizer, so that no text of it can be constrained"
            )
        with self._constraints_lock:
            self._constraints = self._constraints or ConstraintCompiler(self.model.tokenizer)
        return self._constraints.matcher(request.constraint, request.stop_tokens)

    def _run(self) -> None:
        """The thread: a round of steps after another, and what they made to those who asked."""
        try:
            while self._take_news():
                self._round()
                self._deliver()
        except BaseException as error:
            self.on_failure()
            with self._news:
                self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._end_all("failed", self._failure)
            raise
        self._end_all("aborted", "the server is shutting down")

    def _take_news(self) -> bool:
        """Take in new requests, and end those that are aborted or late; False once the engine closes."""
        with self._news:
            if not (self._rounds or self._asked):
                self._news.wait_for(lambda: self._inbox or self._is_closing)
                latest, seen = monotonic() + MOST_SECONDS, 0
                while seen < len(self._inbox) and monotonic() < latest:
                    seen = len(self._inbox)
                    self._news.wait_for(lambda: len(self._inbox) > seen or self._is_closing, PAUSE_SECONDS)  # noqa: B023
            if self._is_closing:
                return False
            news, self._inbox = self._inbox, deque()
        for request_id, asked in news:
            if asked is None:
                self._end_request(request_id, "aborted")
            else:
                self._begin(request_id, asked)
        now = monotonic()
        for request_id, asked in list(self._asked.items()):
            if asked.deadline is not None and now > asked.deadline:
                self._end_request(request_id, "aborted", "the time of the request is over")
        return True

    def _begin(self, request_id: str, asked: _Asked) -> None:
        request = asked.request
        is_scored = request.prompt_logprobs is not None or request.pooled
        if request.max_tokens == 0 and not is_scored:
            for number in range(request.num_texts):
                self._outputs.append((asked, Output(text_number=number, done="length")))
            return
        self._asked[request_id] = asked
        first = None
        for number in range(request.num_texts if request.max_tokens else 1):
            own = replace(request, sampling=replace(request.sampling, seed=(request.sampling.seed + number) % 2**32))
            text = Text(request_id, number, own, list(request.prompt), next(self._numbers), first)
            text.is_scored = is_scored and number == 0
            first = first or text
            asked.texts.append(text)
            tokenizer = self.model.tokenizer
            asked.growing[number] = GrowingText(TokenStream(tokenizer) if tokenizer else None)
            if asked.matchers:
                text.matcher = asked.matchers[number]
                self._constrain(asked, text)
            elif self.settings.num_drafts:
                text.drafts = ModelDrafts() if self._has_draft_model else NgramDrafts(request.prompt)
            if text.done is None:
                self.scheduler.add(text)

    def _constrain(self, asked: _Asked, text: Text) -> None:
        """Find which tokens may come next in a constrained text; end it where there is none."""
        assert text.matcher is not None
        mask, error = np.zeros(self.runner.words, np.uint32), ""
        try:
            if text.matcher.mask(mask, stops=text.num_made >= text.request.min_tokens):
                text.mask = mask
                return
            text.done = "token"
        except MeshwrightError as found:
            text.done, error = "failed", str(found)
        self.scheduler.end(text)
        self._outputs.append((asked, Output(text_number=text.number, done=text.done, error=error)))
        self._forget_ended(text.request_id, asked)

    def _admitted(self, text: Text) -> None:
        """Say how a text's tokens are chosen, where they or those of its row before are not the likeliest."""
        assert text.row is not None
        request = text.request
        is_special = replace(request.sampling, seed=0) != GREEDY or bool(request.logit_bias)
        if is_special or text.row in self._special_rows:
            length = len(request.prompt)
            self._changes.append(
                RowChange(text.row, request.sampling, request.prompt, text.tokens[length:], request.logit_bias)
            )
            (self._special_rows.add if is_special else self._special_rows.discard)(text.row)

    def _round(self) -> None:
        """Dispatch the next steps, and read the oldest that are on their way."""
        steps = [(step, self.runner.run(self._work(step))) for step in self.scheduler.steps()]
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
                self._keep_pace(oldest[0][0], now - self._read_at)
            self._read_at = now if self._rounds else None

    def _keep_pace(self, step: Step, seconds: float) -> None:
        """Count a step of decoding that nothing came between."""
        pace, size = self.pace, self.layout.page_size
        pace.steps += 1
        pace.seconds += seconds
        pace.texts += len(step.slices)
        pace.cached += sum((part.start // size + 1) * size for part in step.slices)

    def means(self) -> tuple[Means, Means] | None:
        """What is measured of steps and what is planned; see `measured_and_planned`."""
        dtype, settings, config = self.model.dtype, self.settings, self.model.config
        assert self.context.cache_split is not None
        layout = ServingLayout(self.model.mesh_shape, self.context.cache_split)
        serving = Serving(
            model=config, prompt_len=1, output_len=1, page_size=self.layout.page_size // page_parts(config, layout),
            weight_dtype=settings.weight_dtype or dtype, kv_dtype=settings.kv_dtype or dtype, compute_dtype=dtype,
        )  # fmt: skip
        return measured_and_planned(self.pace, serving, layout, self.model.system, self.layout.chunks[0][1])

    def _work(self, step: Step) -> Work:
        """A step in numbers."""
        shape = self.runner.shape_of(step)
        is_special = any(part.is_chosen and self._is_special(part.text) for part in step.slices)
        kind = "scoring" if step.is_scored else "sampling" if is_special else "greedy"
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

    def _is_special(self, text: Text) -> bool:
        request = text.request
        return (
            text.row in self._special_rows
            or request.logprobs is not None
            or text.mask is not None
            or text.num_made - 1 < request.min_tokens
        )

    def _read(self, step: Step, result: Result) -> None:
        """Take in what a step made."""
        if step.is_scored:
            self._read_scores(step, result)
            return
        assert result.made is not None
        made = np.asarray(result.made)
        logprobs = [np.asarray(array) for array in result.logprobs] if result.logprobs and _has_logprobs(step) else None
        for part in step.slices:
            if not part.is_chosen:
                continue
            text = part.text
            tokens = [token for token in made[part.at].tolist() if token >= 0]
            self.scheduler.chosen(text, tokens)
            self._num_generated += len(tokens)
            if text.done is not None:
                continue
            found = ()
            if logprobs is not None and text.request.logprobs is not None:
                found = tuple(
                    _token_logprob(token, [array[part.at, place] for array in logprobs], text.request.logprobs)
                    for place, token in enumerate(tokens)
                )
            self._grow(text, tokens, found)

    def _grow(self, text: Text, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Add tokens to a text, until one ends it."""
        asked = self._asked[text.request_id]
        request, growing = text.request, asked.growing[text.number]
        before, pieces, kept = text.num_made - text.unread - len(tokens), "", list[int]()
        self.pace.made += len(tokens)
        if not before:
            self.pace.firsts += 1
            self.pace.first_seconds += monotonic() - text.submitted
            self.pace.prompt_tokens += len(request.prompt)
        for number, token in enumerate(tokens, start=before + 1):
            pieces += growing.add(token, request.stop_tokens, request.stop, is_last=number >= request.max_tokens)
            if growing.done != "token":
                kept.append(token)
            if growing.done:
                break
        text.done = growing.done
        if text.done:
            self.scheduler.end(text)
        self._outputs.append((asked, self._output(asked, text, tuple(kept), pieces, tuple(logprobs[: len(kept)]))))
        if text.drafts is not None:
            text.drafts.extend(kept)
        if text.matcher is not None and text.done is None:
            for token in kept:
                text.matcher.accept(token)
            self._constrain(asked, text)
        self._forget_ended(text.request_id, asked)

    def _output(
        self, asked: _Asked, text: Text, tokens: tuple[int, ...], piece: str, logprobs: tuple[TokenLogprob, ...]
    ) -> Output:
        """What a step adds to a text; with what is known of the prompt, if it is the first."""
        prompt, pooled = (), ()
        if text.number == 0 and asked.logprobs:
            prompt = tuple(asked.logprobs[position] for position in range(1, len(asked.request.prompt)))
            asked.logprobs = {}
        if text.number == 0 and asked.hidden:
            sums = np.sum(np.stack(list(asked.hidden.values())), axis=0, dtype=np.float64)
            pooled = tuple(np.asarray(sums / len(asked.request.prompt)).tolist()) if asked.request.pooled else ()
            asked.hidden = {}
        cached, text.cached = text.cached or 0, 0
        return Output(
            text_number=text.number,
            tokens=tokens,
            text=piece,
            logprobs=logprobs,
            done=text.done,
            stop=asked.growing[text.number].stop if text.done == "text" else None,
            cached_tokens=cached,
            prompt_logprobs=prompt,
            pooled=pooled,
        )

    def _read_scores(self, step: Step, result: Result) -> None:
        """Take in the log probabilities and hidden states of chunks of prompts."""
        assert result.logprobs is not None
        assert result.hidden is not None
        arrays, hidden = [np.asarray(array) for array in result.logprobs], np.asarray(result.hidden)
        for part in step.slices:
            text, asked = part.text, self._asked.get(part.text.request_id)
            if text.done is not None or asked is None:
                continue
            request, end = asked.request, part.start + len(part.tokens)
            asked.hidden[part.start] = hidden[part.at]
            if request.prompt_logprobs is not None:
                for place, position in enumerate(range(part.start + 1, min(end + 1, len(request.prompt)))):
                    own = [array[part.at, place] for array in arrays]
                    asked.logprobs[position] = _token_logprob(request.prompt[position], own, request.prompt_logprobs)
            if end == len(request.prompt) and not request.max_tokens:
                text.done = "length"
                self.scheduler.end(text)
                self._outputs.append((asked, self._output(asked, text, (), "", ())))
                self._end_others(asked, "length")
                self._forget_ended(text.request_id, asked)

    def _forget_ended(self, request_id: str, asked: _Asked) -> None:
        if all(text.done for text in asked.texts):
            self._asked.pop(request_id, None)

    def _end_others(self, asked: _Asked, done: Ending, error: str = "") -> None:
        """End the texts that no step makes: where a prompt is only read, it is read for the first of them."""
        for number in range(len(asked.texts), asked.request.num_texts):
            self._outputs.append((asked, Output(text_number=number, done=done, error=error)))

    def _end_request(self, request_id: str, done: Ending, error: str = "") -> None:
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        for text in asked.texts:
            if text.done is None:
                text.done = done
                self.scheduler.end(text)
                self._outputs.append((asked, Output(text_number=text.number, done=done, error=error)))
        self._end_others(asked, done, error)

    def _end_all(self, done: Ending, error: str) -> None:
        with self._news:
            news, self._inbox = self._inbox, deque()
        for asked in (asked for _, asked in news if asked is not None):
            outputs = [Output(text_number=number, done=done, error=error) for number in range(asked.request.num_texts)]
            asked.deliver(outputs)
        for request_id in list(self._asked):
            self._end_request(request_id, done, error)
        self._deliver()

    def _deliver(self) -> None:
        """Give what was made to those who asked."""
        outputs, self._outputs = self._outputs, []
        for asked, group in itertools.groupby(outputs, key=lambda pair: pair[0]):
            asked.deliver([output for _, output in group])


def _has_logprobs(step: Step) -> bool:
    return step.is_scored or any(part.text.request.logprobs is not None for part in step.slices)


def _token_logprob(token: int, arrays: Sequence[np.ndarray], count: int) -> TokenLogprob:
    """Of one token, from its own log probability, and the values and tokens of the likeliest."""
    own, values, tokens = arrays
    return TokenLogprob(token, float(own), tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)))
