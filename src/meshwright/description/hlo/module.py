"""An HLO program as data: a module of computations of instructions, as read by `parser.parse_hlo`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from meshwright.description.hlo.shapes import Shape
from meshwright.errors import MeshwrightError

_BRANCHES = ("branch_computations", "true_computation", "false_computation")

CALL_KEYS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    *_BRANCHES,
    "called_computations",
    "select",
    "scatter",
)
"""The attributes that name called computations."""

_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One HLO instruction.

    Attributes:
        computation: the name of the computation that contains it.
        text: the printed text in parentheses: operands, a constant's literal, or a parameter's number.
        operands: the names of its operands.
        attributes: each `key=value` after the parentheses; values are as printed.
        op_name: the path of named scopes and transformations; '' if the compiler prints none.
        source: file:line; '' if the compiler prints none.
    """

    name: str
    computation: str
    shape: Shape
    opcode: str
    text: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    op_name: str
    source: str

    @property
    def index(self) -> int:
        """The number of a parameter, or the tuple index of a get-tuple-element. Raises for other instructions."""
        digits = self.text if self.opcode == "parameter" else self.attributes.get("index", "")
        if not digits.isdecimal() or len(digits) > 9:
            raise MeshwrightError(
                f"HLO instruction {self.name} ({self.opcode}) has the index {digits[:20]!r}, no number"
            )
        return int(digits)

    def called(self, *keys: str) -> tuple[str, ...]:
        """Return the names of the computations in some attributes, such as `calls`, `to_apply` or `body`."""
        return tuple(name for key in keys for name in _NAME.findall(self.attributes.get(key, "")))

    @property
    def branches(self) -> tuple[str, ...]:
        """The names of the computations that a conditional chooses from."""
        return self.called(*_BRANCHES)

    @property
    def custom_call_target(self) -> str:
        """The function that a custom call calls; '' for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A computation of a module.

    instructions: by name, in printed order, which is the order of execution in a scheduled module. root: the name of
    the instruction whose value the computation returns.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that use the result of each instruction, by the latter's name, without repetition."""
        users: dict[str, dict[str, Instruction]] = {name: {} for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users[operand][instruction.name] = instruction
        return {name: tuple(found.values()) for name, found in users.items()}

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by number."""
        return {found.index: found for found in self.instructions.values() if found.opcode == "parameter"}


@dataclass(frozen=True, kw_only=True)
class Module:
    """An HLO module. attributes: the attributes in its header, as printed. entry: the name of the entry computation."""

    name: str
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    entry: str

    @cached_property
    def callers(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that call each computation, through any attribute, by the computation's name."""
        callers: dict[str, list[Instruction]] = {name: [] for name in self.computations}
        for instruction in self.instructions():
            for name in dict.fromkeys(instruction.called(*CALL_KEYS)):
                callers[name].append(instruction)
        return {name: tuple(found) for name, found in callers.items()}

    @property
    def num_devices(self) -> int:
        """Replicas times partitions; 1 if the header has neither."""
        return math.prod(int(self.attributes.get(key, "1")) for key in ("replica_count", "num_partitions"))

    def instructions(self) -> Iterator[Instruction]:
        """Yield every instruction of every computation."""
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def operand(self, instruction: Instruction, index: int = 0) -> Instruction:
        """Return the instruction that produces an operand."""
        return self.computations[instruction.computation].instructions[instruction.operands[index]]

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions that produce the operands."""
        found = self.computations[instruction.computation].instructions
        return tuple(found[name] for name in instruction.operands)

    def users(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions of the same computation that use an instruction's result."""
        return self.computations[instruction.computation].users[instruction.name]

    def root(self, computation: str) -> Instruction:
        """Return the root instruction of a computation."""
        found = self.computations[computation]
        return found.instructions[found.root]


@contextmanager
def contradictions_as_errors(module: Module) -> Iterator[None]:
    """Raise lookup and arithmetic errors inside the context as a `MeshwrightError`.

    Parsing finds missing text. Contradictions between parts of a module cause such errors when it is analysed.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except (LookupError, ValueError, ArithmeticError) as error:
        raise MeshwrightError(f"HLO module {module.name} contradicts itself: {error}") from None
