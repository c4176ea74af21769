"""Constrained decoding: which tokens may come next in a text that has to match a grammar."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.serving.grammars import NAMES, compile_grammar, read_vocabulary
from meshwright.serving.request import Constraint
from meshwright.text import Tokenizer

MOST_SOURCE = 1 << 16
"""The characters of a constraint's source."""
NUM_KEPT = 64
"""The compiled constraints, and the reasons against others, that are kept for more requests with them."""
START_SECONDS = 60.0
"""How long the process that tries constraints may take to start and to read the vocabulary."""


class Matcher:
    """The state of one constrained text."""

    def __init__(self, of: LLMatcher, vocabulary: LLTokenizer, stop_tokens: Sequence[int]) -> None:
        self._of = of
        self._num_words = -(-vocabulary.vocab_size // 32)
        self._ends = _bits([*vocabulary.eos_tokens, *stop_tokens])
        self._stops = _bits(stop_tokens)

    @property
    def may_stop(self) -> bool:
        """Whether the text matches as it is."""
        return self._of.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the text matches, and is known to match no longer with any token more."""
        return self._of.is_stopped() and not self._of.is_error()

    def mask(self, out: NDArray[np.uint32], *, stops: bool = True) -> bool:
        """Write the tokens that may come next; False where there is none, so that the text ends as it is.

        Args:
            out: words [ceil(vocab / 32)] of the model's vocabulary: bit i of word w is token 32 w + i.
            stops: whether stop tokens are among them once the text matches.

        Raises:
            MeshwrightError: a text at which the grammar is too complex to go on, or that no token continues.
        """
        words = out[: self._num_words]
        self._of.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._of.is_error():
            raise MeshwrightError(f"the text cannot be constrained further: {_first_line(self._of.get_error())}")
        out[self._num_words :] = 0
        may_stop = self.may_stop
        # Also where the grammar has such a token in the middle of a text: chosen, it would end the text there.
        for word, bit in self._ends:
            out[word] &= ~bit
        (used,) = np.nonzero(out)
        if len(used) == 1 and (only := int(out[used[0]])) & (only - 1) == 0:
            # The only token may be the unknown one, as which the tokenizer encodes the text that the grammar forces.
            out[used[0]] *= self._of.validate_tokens([32 * int(used[0]) + only.bit_length() - 1])
        is_any = bool(out.any())
        if may_stop and stops:
            for word, bit in self._stops:
                out[word] |= bit
            return is_any or len(self._stops) > 0
        if not is_any and not may_stop:
            raise MeshwrightError("the text cannot be constrained further: no token of the vocabulary continues it")
        return is_any

    def accept(self, token: int) -> None:
        """Add a token to the text, no stop token.

        Raises:
            MeshwrightError: a token that may not come next, or one after which the grammar is too complex.
        """
        if not self._of.consume_token(token):
            raise MeshwrightError(f"the constraint refuses token {token}: {_first_line(self._of.get_error())}")

    def num_accepted(self, tokens: list[int]) -> int:
        """How many of some tokens may come next, one after the other; nothing is added."""
        return self._of.validate_tokens(tokens)

    def rollback(self, count: int) -> None:
        """Take the last tokens from the text."""
        self._of.rollback(count)


class ConstraintCompiler:
    """Compiles constraints for the texts of one tokenizer; safe to use from several threads.

    A constraint is first compiled in a process of its own, which may crash, or take too long: then it is refused.

    Args:
        seconds: the most that compiling a constraint may take.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = 2.0) -> None:
        self._described = (tokenizer.to_json(), list(tokenizer.stop_tokens))
        self._vocabulary = read_vocabulary(*self._described)
        self._stop_tokens = tokenizer.stop_tokens
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[Constraint, LLMatcher | MeshwrightError] = OrderedDict()
        self._process: subprocess.Popen[str] | None = None

    def matcher(self, constraint: Constraint, stop_tokens: tuple[int, ...] = ()) -> Matcher:
        """A matcher for a text that begins.

        Args:
            stop_tokens: those that end the text beside the tokenizer's.

        Raises:
            MeshwrightError: a constraint that is wrong, not supported, or too complex.
        """
        with self._lock:
            if constraint not in self._known:
                self._known[constraint] = self._compile(constraint)
                while len(self._known) > NUM_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(constraint)
            found = self._known[constraint]
            if isinstance(found, MeshwrightError):
                raise MeshwrightError(str(found))
            of = found.deep_copy()
        return Matcher(of, self._vocabulary, [*self._stop_tokens, *stop_tokens])

    def close(self) -> None:
        """End the process that tries constraints."""
        with self._lock:
            self._end_process()

    def _compile(self, constraint: Constraint) -> LLMatcher | MeshwrightError:
        name = NAMES[constraint.kind]
        if len(constraint.source) > MOST_SOURCE:
            return MeshwrightError(
                f"the {name} has {len(constraint.source):,} characters; at most {MOST_SOURCE:,} are taken"
            )
        try:
            reason = self._try([constraint.kind, constraint.source])
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

    def _try(self, grammar: list[str]) -> str | None:
        """The reason against a grammar, from a process of its own; None where it compiles there."""
        if self._process is None:
            variables = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command = [sys.executable, "-m", "meshwright.serving.grammars"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=variables,
            )
            try:
                self._exchange(self._process, self._described, START_SECONDS)
            except (TimeoutError, EOFError):
                raise RuntimeError("the process that tries constraints does not start") from None
        return self._exchange(self._process, grammar, self._seconds)

    def _exchange(self, process: subprocess.Popen[str], line: object, seconds: float) -> str | None:
        """Send a line and read the answer; the process is ended where there is none."""
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
            self._end_process()
            raise EOFError from None
        except (TimeoutError, EOFError):
            self._end_process()
            raise

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its pipes and waits
                pass
            self._process = None


def _bits(tokens: Sequence[int]) -> list[tuple[int, np.uint32]]:
    """For each token its word in a mask, and its bit."""
    return [(token // 32, np.uint32(1 << token % 32)) for token in set(tokens)]


def _first_line(error: str) -> str:
    return error.removesuffix("<non-verbose/>").strip().splitlines()[0]
