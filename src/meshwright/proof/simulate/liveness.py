"""Find when each buffer of a program is in use, computation by computation, and where the sum of live bytes peaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from meshwright.description.hlo.loops import called_in_sequence, sequential_computations
from meshwright.description.hlo.module import Instruction, Module
from meshwright.proof.simulate.aliasing import Leaf, alias_buffers, leaves, reusable_operands

_FORWARDS = frozenset({"tuple", "get-tuple-element"})


@dataclass(frozen=True)
class Span:
    """The live range of a buffer in a computation: positions of its first definition and its last use.

    leaf: the first of the leaves that share the buffer.
    """

    first: int
    last: int
    leaf: Leaf
    num_bytes: int


@dataclass(frozen=True)
class Peak:
    """The moment with the most live bytes in a computation and in those it calls.

    moment: the instructions running then, the caller's first. live: the buffers in use then.
    """

    num_bytes: int
    moment: tuple[str, ...]
    live: tuple[Span, ...]


_EMPTY = Peak(0, (), ())


class Liveness:
    """Live ranges and peaks of the computations of a module that run instruction by instruction.

    A buffer is represented by one of the leaves that share it: `aliases.find` of each of them returns this leaf.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.aliases = alias_buffers(module, sequential_computations(module))
        self._peaks: dict[str, Peak] = {}
        self._known_spans: dict[str, dict[Leaf, Span]] = {}

    def peak(self, computation: str) -> Peak:
        """Return the moment of a computation with the most live bytes, with those inside what an instruction calls."""
        if computation in self._peaks:
            return self._peaks[computation]
        instructions = list(self.module.computations[computation].instructions.values())
        spans = self.spans(computation)
        changes = [0] * (len(instructions) + 1)
        for span in spans:
            changes[span.first] += span.num_bytes
            changes[span.last + 1] -= span.num_bytes
        most, place, within = 0, 0, _EMPTY
        for position, (instruction, alive) in enumerate(zip(instructions, accumulate(changes), strict=False)):
            called = max(
                (self.peak(name) for name in called_in_sequence(instruction)),
                key=lambda p: p.num_bytes,
                default=_EMPTY,
            )
            if alive + called.num_bytes > most:
                most, place, within = alive + called.num_bytes, position, called
        live = tuple(span for span in spans if span.first <= place <= span.last)
        found = Peak(most, (instructions[place].name, *within.moment), (*live, *within.live))
        self._peaks[computation] = found
        return found

    def spans(self, computation: str) -> list[Span]:
        """Return the live ranges of the buffers that are counted in a computation.

        Arguments and results of a call are counted in the calling computation. While a loop runs, its state is counted
        in the loop's body, with the live range in one iteration. Arguments of the program are live throughout.
        """
        lives = dict(self._live_spans(computation))
        instructions = self.module.computations[computation].instructions
        if any(caller.opcode != "while" for caller in self.module.callers[computation]):
            outside = self._buffers([*self._parameter_leaves(computation), *leaves(self.module.root(computation))])
            lives = {buffer: span for buffer, span in lives.items() if buffer not in outside}
        elif computation != self.module.entry:
            lives = {buffer: span for buffer, span in lives.items() if not self.is_argument(span.leaf)}
        for position, instruction in enumerate(instructions.values()):
            for result, operand in reusable_operands(self.module, instruction):
                _reuse_memory(lives, self.aliases.find(result), self.aliases.find(operand), position)
        spans = list(lives.values())
        for position, instruction in enumerate(instructions.values()):
            if instruction.opcode == "while":
                state = self._buffers(leaves(instruction)) - self._arguments
                spans = [part for span in spans for part in self._without_loop(span, position, state)]
        return [span for span in spans if span.num_bytes and span.first <= span.last]

    def origin(self, leaf: Leaf) -> Leaf:
        """Return the leaf that first defines a leaf's buffer: for a loop's state, a leaf before the loop."""
        while (outside := self._leaf_in_caller(leaf)) is not None:
            leaf = self._live_spans(outside.computation)[self.aliases.find(outside)].leaf
        return leaf

    def is_argument(self, leaf: Leaf) -> bool:
        """Whether a leaf is in an argument's buffer, directly or as a loop's state."""
        while (outside := self._leaf_in_caller(leaf, or_returned=True)) is not None:
            leaf = outside
        return self.aliases.find(leaf) in self._arguments

    def is_returned(self, leaf: Leaf) -> bool:
        """Whether a leaf of the entry is in a buffer that the program returns."""
        return self.aliases.find(leaf) in self._buffers(leaves(self.module.root(self.module.entry)))

    @cached_property
    def _arguments(self) -> set[Leaf]:
        """The buffers of the program's arguments, by their representative leaves."""
        return self._buffers(self._parameter_leaves(self.module.entry))

    def _buffers(self, some: list[Leaf]) -> set[Leaf]:
        """Return the buffers of some leaves, by their representative leaves."""
        return {self.aliases.find(leaf) for leaf in some}

    def _live_spans(self, computation: str) -> dict[Leaf, Span]:
        """Return {representative leaf: live range} for every buffer that a computation touches; computed once."""
        if computation not in self._known_spans:
            self._known_spans[computation] = self._compute_spans(computation)
        return self._known_spans[computation]

    def _compute_spans(self, computation: str) -> dict[Leaf, Span]:
        """Return {representative leaf: live range} for a computation, in one pass over its instructions."""
        found = self.module.computations[computation]
        lives: dict[Leaf, Span] = {}
        for position, instruction in enumerate(found.instructions.values()):
            for leaf, array in zip(leaves(instruction), instruction.shape.arrays(), strict=True):
                size = array.padded_bytes if array.is_in_hbm and instruction.opcode != "constant" else 0
                span = lives.setdefault(self.aliases.find(leaf), Span(position, position, leaf, 0))
                size = max(size, span.num_bytes)
                lives[self.aliases.find(leaf)] = replace(span, last=position, num_bytes=size)
            if instruction.opcode not in _FORWARDS:
                self._use(lives, instruction, position)
        end = len(found.instructions) - 1
        for leaf in leaves(self.module.root(computation)):
            lives[self.aliases.find(leaf)] = replace(lives[self.aliases.find(leaf)], last=end)
        for leaf in self._parameter_leaves(computation):
            span = lives[self.aliases.find(leaf)]
            held = end if computation == self.module.entry else span.last
            lives[self.aliases.find(leaf)] = replace(span, first=0, last=held)
        return lives

    def _use(self, lives: dict[Leaf, Span], user: Instruction, position: int) -> None:
        """Extend the live range (in `lives`) of each operand of the instruction `user` to `position`, where it runs.

        Operands of an all-reduce-start are live until its done.
        """
        if user.opcode == "all-reduce-start":
            order = list(self.module.computations[user.computation].instructions)
            position = max((order.index(done.name) for done in self.module.users(user)), default=position)
        for operand in self.module.operands(user):
            for leaf in leaves(operand):
                buffer = self.aliases.find(leaf)
                lives[buffer] = replace(lives[buffer], last=max(lives[buffer].last, position))

    def _without_loop(self, span: Span, position: int, state: set[Leaf]) -> Iterator[Span]:
        """Yield the parts of a span before and after the loop at `position`; all of it if its buffer is not in `state`.

        state: the buffers of the loop's state, by their representative leaves.
        """
        if self.aliases.find(span.leaf) not in state or not span.first <= position <= span.last:
            yield span
            return
        yield replace(span, last=position - 1)
        yield replace(span, first=position + 1)

    def _leaf_in_caller(self, leaf: Leaf, *, or_returned: bool = False) -> Leaf | None:
        """Return the leaf of a loop's result whose buffer is that of a leaf of the loop's body; None if there is none.

        The leaf must share the buffer of the body's parameter or, with `or_returned`, of the body's root.
        """
        callers = [caller for caller in self.module.callers[leaf.computation] if caller.opcode == "while"]
        if not callers:
            return None
        ends = [self._parameter_leaves(leaf.computation)]
        if or_returned:
            ends.append(leaves(self.module.root(leaf.computation)))
        for end in ends:
            for number, one in enumerate(end):
                if self.aliases.find(one) == self.aliases.find(leaf):
                    return Leaf(callers[0].computation, callers[0].name, number)
        return None

    def _parameter_leaves(self, computation: str) -> list[Leaf]:
        """Return the leaves of a computation's parameters, in order."""
        parameters = self.module.computations[computation].parameters
        return [leaf for number in sorted(parameters) for leaf in leaves(parameters[number])]


def _reuse_memory(lives: dict[Leaf, Span], result: Leaf, operand: Leaf, position: int) -> None:
    """Let a result reuse an operand's memory if the instruction that computes it is the operand's last use.

    The result's live range in `lives` then starts one instruction later.

    Args:
        lives: the live range of each buffer, by its representative leaf.
        result: the representative leaf of the result's buffer.
        operand: that of the operand's buffer.
        position: the position of the instruction.
    """
    born, dying = lives.get(result), lives.get(operand)
    if born is None or dying is None or born.num_bytes != dying.num_bytes:
        return
    if result != operand and born.first == position == dying.last:
        lives[result] = replace(born, first=position + 1)
