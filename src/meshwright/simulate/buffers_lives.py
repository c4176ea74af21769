"""From when to when each buffer of a program is in use, computation by computation, and where they take most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from meshwright.hlo import Instruction, Module
from meshwright.hlo.loops import called_in_sequence, sequential_computations
from meshwright.simulate.buffers_shared import Leaf, leaves, share_buffers, taken_over

_HANDED_ON = frozenset({"tuple", "get-tuple-element"})


@dataclass(frozen=True)
class Span:
    """The life of a buffer in one computation: from the position where it is made to the last where it is used.

    leaf: the one that is made there, of those that share the buffer.
    """

    first: int
    last: int
    leaf: Leaf
    num_bytes: int


@dataclass(frozen=True)
class Peak:
    """The most that a computation takes at a time, with what it calls: how much, in which instructions, what for."""

    num_bytes: int
    moment: tuple[str, ...]
    live: tuple[Span, ...]


_NOTHING = Peak(0, (), ())


class Liveness:
    """The spans and the peaks of the computations of a module that run instruction by instruction."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.shared = share_buffers(module, sequential_computations(module))
        self._peaks: dict[str, Peak] = {}
        self._known_lives: dict[str, dict[Leaf, Span]] = {}

    def peak(self, computation: str) -> Peak:
        """The largest sum of what lives at an instruction of a computation and what that instruction calls takes."""
        if computation in self._peaks:
            return self._peaks[computation]
        instructions = list(self.module.computations[computation].instructions.values())
        spans = self.spans(computation)
        changes = [0] * (len(instructions) + 1)
        for span in spans:
            changes[span.first] += span.num_bytes
            changes[span.last + 1] -= span.num_bytes
        most, place, within = 0, 0, _NOTHING
        for position, (instruction, alive) in enumerate(zip(instructions, accumulate(changes), strict=False)):
            called = max(
                (self.peak(name) for name in called_in_sequence(instruction)),
                key=lambda p: p.num_bytes,
                default=_NOTHING,
            )
            if alive + called.num_bytes > most:
                most, place, within = alive + called.num_bytes, position, called
        live = tuple(span for span in spans if span.first <= place <= span.last)
        found = Peak(most, (instructions[place].name, *within.moment), (*live, *within.live))
        self._peaks[computation] = found
        return found

    def spans(self, computation: str) -> list[Span]:
        """The lives of the buffers that a computation has to account for.

        What a call is given and returns is its caller's. The state of a loop is its body's while it runs, where it can
        be seen how long each trip holds it; arguments of the program are held throughout.
        """
        lives = dict(self._lives(computation))
        instructions = self.module.computations[computation].instructions
        if self._is_called(computation):
            outside = {self.shared.find(leaf) for leaf in self._given_and_returned(computation)}
            lives = {buffer: span for buffer, span in lives.items() if buffer not in outside}
        elif computation != self.module.entry:
            lives = {buffer: span for buffer, span in lives.items() if not self.is_argument(span.leaf)}
        for position, instruction in enumerate(instructions.values()):
            for result, operand in taken_over(self.module, instruction):
                _take_over(lives, self.shared.find(result), self.shared.find(operand), position)
        spans = list(lives.values())
        for position, instruction in enumerate(instructions.values()):
            if instruction.opcode == "while":
                state = {self.shared.find(leaf) for leaf in leaves(instruction)} - self._arguments
                spans = [part for span in spans for part in self._around(span, position, state)]
        return [span for span in spans if span.num_bytes and span.first <= span.last]

    def made(self, leaf: Leaf) -> Leaf:
        """The leaf that first makes what lies in a leaf's buffer: before the loop where it is a loop's state."""
        while (outside := self._outside(leaf)) is not None:
            leaf = self._lives(outside.computation)[self.shared.find(outside)].leaf
        return leaf

    def is_argument(self, leaf: Leaf) -> bool:
        """Whether a leaf lies in an argument's buffer, or is a loop's state that does."""
        while (outside := self._outside(leaf, or_returned=True)) is not None:
            leaf = outside
        return self.shared.find(leaf) in self._arguments

    def is_returned(self, leaf: Leaf) -> bool:
        """Whether a leaf of the entry lies in a buffer that the program returns."""
        return self.shared.find(leaf) in {self.shared.find(one) for one in leaves(self.module.root(self.module.entry))}

    @cached_property
    def _arguments(self) -> set[Leaf]:
        """The buffers of the program's arguments."""
        return {self.shared.find(leaf) for leaf in self._given(self.module.entry)}

    def _lives(self, computation: str) -> dict[Leaf, Span]:
        """The life of every buffer that a computation touches, by the leaf that stands for the buffer."""
        if computation not in self._known_lives:
            self._known_lives[computation] = self._read_lives(computation)
        return self._known_lives[computation]

    def _read_lives(self, computation: str) -> dict[Leaf, Span]:
        """The lives, from one pass over the instructions."""
        found = self.module.computations[computation]
        lives: dict[Leaf, Span] = {}
        for position, instruction in enumerate(found.instructions.values()):
            for leaf, array in zip(leaves(instruction), instruction.shape.arrays(), strict=True):
                size = array.padded_bytes if array.is_in_hbm and instruction.opcode != "constant" else 0
                span = lives.setdefault(self.shared.find(leaf), Span(position, position, leaf, 0))
                size = max(size, span.num_bytes)
                lives[self.shared.find(leaf)] = replace(span, last=position, num_bytes=size)
            if instruction.opcode not in _HANDED_ON:
                self._use(lives, instruction, position)
        end = len(found.instructions) - 1
        for leaf in leaves(self.module.root(computation)):
            lives[self.shared.find(leaf)] = replace(lives[self.shared.find(leaf)], last=end)
        for leaf in self._given(computation):
            span = lives[self.shared.find(leaf)]
            held = end if computation == self.module.entry else span.last
            lives[self.shared.find(leaf)] = replace(span, first=0, last=held)
        return lives

    def _use(self, lives: dict[Leaf, Span], user: Instruction, position: int) -> None:
        """Let what an instruction takes live to its position; what an all-reduce is started on, to its end."""
        if user.opcode == "all-reduce-start":
            order = list(self.module.computations[user.computation].instructions)
            position = max((order.index(done.name) for done in self.module.users(user)), default=position)
        for operand in self.module.operands(user):
            for leaf in leaves(operand):
                buffer = self.shared.find(leaf)
                lives[buffer] = replace(lives[buffer], last=max(lives[buffer].last, position))

    def _around(self, span: Span, position: int, state: set[Leaf]) -> Iterator[Span]:
        """A span without the position of a loop whose state it is."""
        if self.shared.find(span.leaf) not in state or not span.first <= position <= span.last:
            yield span
            return
        yield replace(span, last=position - 1)
        yield replace(span, first=position + 1)

    def _outside(self, leaf: Leaf, *, or_returned: bool = False) -> Leaf | None:
        """The leaf of a loop that a leaf of its body is the state of, when a trip begins; or else when it ends."""
        callers = [caller for caller in self.module.callers[leaf.computation] if caller.opcode == "while"]
        if not callers:
            return None
        ends = [self._given(leaf.computation)]
        if or_returned:
            ends.append(leaves(self.module.root(leaf.computation)))
        for end in ends:
            for number, one in enumerate(end):
                if self.shared.find(one) == self.shared.find(leaf):
                    return Leaf(callers[0].computation, callers[0].name, number)
        return None

    def _given(self, computation: str) -> list[Leaf]:
        """The leaves of a computation's parameters."""
        parameters = self.module.computations[computation].parameters
        return [leaf for number in sorted(parameters) for leaf in leaves(parameters[number])]

    def _given_and_returned(self, computation: str) -> list[Leaf]:
        """The leaves of a computation's parameters and of its result."""
        return [*self._given(computation), *leaves(self.module.root(computation))]

    def _is_called(self, computation: str) -> bool:
        """Whether something else than a loop runs a computation."""
        return any(caller.opcode != "while" for caller in self.module.callers[computation])


def _take_over(lives: dict[Leaf, Span], result: Leaf, operand: Leaf, position: int) -> None:
    """Let a result that begins where an operand ends begin behind it, in the same memory."""
    born, dying = lives.get(result), lives.get(operand)
    if born is None or dying is None or born.num_bytes != dying.num_bytes:
        return
    if result != operand and born.first == position == dying.last:
        lives[result] = replace(born, first=position + 1)
