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

    text: the printed text in parentheses (operands, a constant's literal, a parameter's number). attributes: each
    `key=value` after it, values as printed. op_name: path of named scopes and transformations. source: file:line. The
    last two are empty if the compiler prints none.
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
        """The number of a parameter, or the tuple index of a get-tuple-element. Raises if it is not a number."""
        digits = self.text if self.opcode == "parameter" else self.attributes.get("index", "")
        if not digits.isdecimal() or len(digits) > 9:
            raise MeshwrightError(
                f"HLO instruction {self.name} ({self.opcode}) has the index {digits[:20]!r}, no number"
            )
        return int(digits)

    def called(self, *keys: str) -> tuple[str, ...]:
        """Return the computations named by some attributes: `calls`, `to_apply`, `body`, `branch_computations`, ..."""
        return tuple(name for key in keys for name in _NAME.findall(self.attributes.get(key, "")))

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations that a conditional chooses from."""
        return self.called(*_BRANCHES)

    @property
    def custom_call_target(self) -> str:
        """The function of a custom call; '' for another instruction."""
        return self.attributes.get("custom_call_target", "").strip('"')


@dataclass(frozen=True, kw_only=True)
class Computation:
    """The instructions of a computation by name, in printed order (the execution order in a scheduled module)."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that use each instruction's result, each once."""
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
    """An HLO module. attributes: its header's attributes, as printed."""

    name: str
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    entry: str

    @cached_property
    def callers(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that call each computation, in any role."""
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
        """Return the instructions of the same computation that use the result."""
        return self.computations[instruction.computation].users[instruction.name]

    def root(self, computation: str) -> Instruction:
        """Return the root instruction of a computation."""
        found = self.computations[computation]
        return found.instructions[found.root]


@contextmanager
def contradictions_as_errors(module: Module) -> Iterator[None]:
    """Turn lookup and arithmetic errors in reading a module into a `MeshwrightError`.

    Parsing finds missing text; contradictions between parts of a module appear only when those are read.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except (LookupError, ValueError, ArithmeticError) as error:
        raise MeshwrightError(f"HLO module {module.name} contradicts itself: {error}") from None
