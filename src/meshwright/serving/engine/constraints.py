"""Constrained decoding: which tokens may come next in generated text that has to match a grammar."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.serving.engine.grammars import NAMES, compile_grammar, read_vocabulary
from meshwright.serving.engine.programs import WORD
from meshwright.serving.engine.request import Constraint

MOST_SOURCE = 1 << 16
"""Maximum number of characters in the source of a constraint."""
NUM_KEPT = 64
"""Number of compiled constraints, or reasons for refusal, that are cached."""
PROCESSES = max(2, min(4, os.cpu_count() or 2))
"""Number of processes that compile constraints. One owner (client) never uses all of them at once."""
START_SECONDS = 60.0
"""Maximum time for a process that compiles constraints to start and read the vocabulary."""


class Matcher:
    """The grammar state of one constrained sequence.

    Args:
        matcher: llguidance's matcher for the grammar.
        vocabulary: llguidance's form of the tokenizer's vocabulary.
        stop_tokens: tokens that end the sequence.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, stop_tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = -(-vocabulary.vocab_size // WORD)
        self._has_stops = bool(stop_tokens)
        ends = {*vocabulary.eos_tokens, *stop_tokens}
        # The model's vocabulary may be larger than the tokenizer's.
        self._end_words = max(self._num_words, *(token // WORD + 1 for token in ends))
        self._not_ends, self._stops = ~bits_of(ends, self._end_words), bits_of(stop_tokens, self._end_words)

    @property
    def may_stop(self) -> bool:
        """Whether the tokens so far match the grammar, so that the sequence may end."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the tokens so far match the grammar, and no further token is allowed."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, out: NDArray[np.uint32], *, stops: bool = True) -> bool:
        """Write the mask of allowed next tokens into `out`. Return False if no token may follow: the text is complete.

        Args:
            out: words [ceil(vocab / 32)] over the model's vocabulary: bit i of word w is token 32 w + i.
            stops: whether stop tokens are allowed once the text matches.

        Raises:
            MeshwrightError: the grammar is too complex at this text, or the text is incomplete and no token can
                continue it.
        """
        words = out[: self._num_words]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise MeshwrightError(f"the text cannot be constrained further: {_first_line(self._matcher.get_error())}")
        out[self._num_words :] = 0
        may_stop = self.may_stop
        # The grammar may allow an end token inside a text, but choosing it would end the text.
        out[: self._end_words] &= self._not_ends
        (used,) = np.nonzero(out)
        if len(used) == 1 and (only := int(out[used[0]])) & (only - 1) == 0:
            # A single allowed token may be the unknown token, if the tokenizer cannot encode the text that the grammar
            # forces.
            out[used[0]] *= self._matcher.validate_tokens([32 * int(used[0]) + only.bit_length() - 1])
        is_any = bool(out.any())
        if may_stop and stops:
            out[: self._end_words] |= self._stops
            return is_any or self._has_stops
        if not is_any and not may_stop:
            raise MeshwrightError("the text cannot be constrained further: no token of the vocabulary continues it")
        return is_any

    def accept(self, token: int) -> None:
        """Add a token, which must not be a stop token, to the text.

        Raises:
            MeshwrightError: the token is not allowed next, or the grammar is too complex after it.
        """
        if not self._matcher.consume_token(token):
            raise MeshwrightError(f"the constraint refuses token {token}: {_first_line(self._matcher.get_error())}")

    def num_accepted(self, tokens: list[int]) -> int:
        """Return how many leading tokens of `tokens` the grammar allows next, one after the other. Adds none."""
        return self._matcher.validate_tokens(tokens)

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens from the text."""
        self._matcher.rollback(count)


class ConstraintCompiler:
    """Compiles constraints for one tokenizer; safe to use from several threads.

    A constraint is first compiled in a separate process. If that process crashes or takes too long, the constraint is
    refused. One owner (client) never uses all of these processes at once.

    Args:
        tokenizer: the model's tokenizer; if it is None, every constraint is refused.
        seconds: maximum time to compile a constraint.
        processes: number of processes.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, seconds: float = 2.0, processes: int = PROCESSES) -> None:
        self._tokenizer = tokenizer
        self._seconds, self._num_processes = seconds, processes
        self._changed = threading.Condition()
        self._known: OrderedDict[Constraint, LLMatcher | MeshwrightError] = OrderedDict()
        self._compiling = dict[Constraint, Future[LLMatcher | MeshwrightError]]()
        self._waiting = list[_Turn]()
        self._running = Counter[str]()
        self._processes = list[_Process]()
        self._idle = list[_Process]()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        assert self._tokenizer is not None
        return read_vocabulary(self._tokenizer.to_json(), list(self._tokenizer.stop_tokens))

    def matcher(self, constraint: Constraint, stop_tokens: tuple[int, ...] = (), owner: str = "") -> Matcher:
        """Return a matcher at the beginning of a sequence. Waits while the constraint is compiled, unless it is cached.

        Args:
            stop_tokens: tokens that end the sequence, in addition to the tokenizer's.
            owner: the client; each client's constraints have their own queue.

        Raises:
            MeshwrightError: the constraint is invalid, unsupported, or too complex.
        """
        if self._tokenizer is None:
            raise MeshwrightError("this model has no tokenizer, so that no sequence of it can be constrained")
        with self._changed:
            vocabulary = self._vocabulary
            found = self._known.get(constraint)
            future = self._compiling.get(constraint) if found is None else None
            is_first = found is None and future is None
            if is_first:
                future = self._compiling[constraint] = Future()
        if is_first:
            assert future is not None
            try:
                future.set_result(self._compile(constraint, owner))
            except BaseException as error:
                future.set_exception(error)
            with self._changed:
                del self._compiling[constraint]
                if future.exception() is None:
                    self._known[constraint] = future.result()
                while len(self._known) > NUM_KEPT:
                    self._known.popitem(last=False)
        if future is not None:
            found = future.result()
        if isinstance(found, MeshwrightError):
            raise MeshwrightError(str(found))
        assert found is not None
        with self._changed:
            if constraint in self._known:
                self._known.move_to_end(constraint)
            of = found.deep_copy()
        return Matcher(of, vocabulary, [*self._tokenizer.stop_tokens, *stop_tokens])

    def close(self) -> None:
        """End the processes that compile constraints."""
        with self._changed:
            processes = list(self._processes)
        for process in processes:
            process.end()

    def _compile(self, constraint: Constraint, owner: str) -> LLMatcher | MeshwrightError:
        name = NAMES[constraint.kind]
        if len(constraint.source) > MOST_SOURCE:
            return MeshwrightError(
                f"the {name} has {len(constraint.source):,} characters; at most {MOST_SOURCE:,} are taken"
            )
        try:
            with self._process_of(owner, len(constraint.source)) as process:
                reason = process.exchange([constraint.kind, constraint.source], self._seconds)
        except TimeoutError:
            return MeshwrightError(f"the {name} is too complex: it takes over {self._seconds:g} s to compile")
        except EOFError:
            return MeshwrightError(f"the {name} is too complex: it takes too much memory to compile")
        if reason:
            return MeshwrightError(reason)
        try:
            return compile_grammar(self._vocabulary, constraint.kind, constraint.source)
        except MeshwrightError as error:
            return error

    @contextmanager
    def _process_of(self, owner: str, size: int) -> Iterator[_Process]:
        """Wait until it is the turn of an owner's constraint of `size` characters; yield an idle process for it."""
        assert self._tokenizer is not None
        with self._changed:
            turn = _Turn(owner, size)
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._next() is turn)
            self._waiting.remove(turn)
            self._running[owner] += 1
            if not self._idle:
                self._processes.append(_Process((self._tokenizer.to_json(), list(self._tokenizer.stop_tokens))))
                self._idle.append(self._processes[-1])
            process = self._idle.pop()
            self._changed.notify_all()
        try:
            process.begin()
            yield process
        finally:
            with self._changed:
                self._idle.append(process)
                self._running[owner] -= 1
                if not self._running[owner]:
                    del self._running[owner]
                self._changed.notify_all()

    def _next(self) -> _Turn | None:
        """Return the next constraint to compile: the shortest one of the owner with the fewest being compiled.

        None if all processes are busy, or every waiting owner already uses all the processes that it may.
        """
        if self._running.total() == self._num_processes:
            return None
        most = max(1, self._num_processes - 1)
        found = (turn for turn in self._waiting if self._running[turn.owner] < most)
        return min(found, key=lambda turn: (self._running[turn.owner], turn.size), default=None)


@dataclass(eq=False)
class _Turn:
    """A constraint that waits for a process."""

    owner: str
    size: int  # Characters of its source.


class _Process:
    """A process that compiles constraints. `begin` starts it again after a constraint ended it.

    described: the vocabulary, as the arguments of `read_vocabulary`.
    """

    def __init__(self, described: tuple[str | None, list[int]]) -> None:
        self._described = described
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Start the process unless it is running.

        Raises:
            RuntimeError: the process does not start in time.
        """
        if self._process is not None:
            return
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.serving.engine.grammars"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        try:
            self.exchange(self._described, START_SECONDS)
        except (TimeoutError, EOFError):
            raise RuntimeError("the process that tries constraints does not start") from None

    def exchange(self, line: object, seconds: float) -> str | None:
        """Send a value as a line of JSON. Return the answer: why the grammar is refused, or None if it compiles.

        Args:
            line: a grammar as [kind, source], or the vocabulary.
            seconds: maximum time for the answer.

        Raises:
            TimeoutError, EOFError: the answer is late, or the process ended. The process is ended in both cases.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(seconds):
                    raise TimeoutError
            answer = process.stdout.readline()
            if not answer:
                raise EOFError
            return json.loads(answer)
        except BrokenPipeError:
            self.end()
            raise EOFError from None
        except (TimeoutError, EOFError):
            self.end()
            raise

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes and waits
                pass


def bits_of(tokens: Iterable[int], words: int) -> NDArray[np.uint32]:
    """Return a token mask of `words` 32-bit words in which the bits of these tokens are set."""
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


def _first_line(error: str) -> str:
    lines = error.removesuffix("<non-verbose/>").strip().splitlines()
    return lines[0] if lines else "llguidance gives no reason"
