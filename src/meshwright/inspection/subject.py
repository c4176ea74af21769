"""A program to look for mistakes in: its module read once, and what each thing in it costs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.compiler import CompiledProgram
from meshwright.cost import achieved_seconds
from meshwright.hardware import Layout, System, lay_mesh
from meshwright.hlo import (
    VIEWS,
    ExecutionCounts,
    Instruction,
    Module,
    Spec,
    canonicalize_collective,
    count_executions,
    describe,
    each_collective,
    flops_of,
    origin,
    parse_hlo_sharding,
)
from meshwright.inspection.variance import Variance
from meshwright.record import Collective, Kind, Phase
from meshwright.simulate import Schedule

_STORED = frozenset(VIEWS | {"convert", "slice", "dynamic-slice", "broadcast"})
"""What leaves a stored value the stored value."""

Rules = Mapping[str, Sequence[str | Sequence[str] | None]]
"""Regular expressions over the paths of arguments, each with the mesh axes of every dim, as in a PartitionSpec."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A collective of a program as a plan would call it, the instruction that makes it, and the kind that this is."""

    instruction: Instruction
    kind: Kind
    collective: Collective


@dataclass(frozen=True, kw_only=True)
class Work:
    """A product of a program, and the flops of all its runs in a step on one device."""

    instruction: Instruction
    flops: int


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a program: its path, the instruction, and how it lies; spec None where no axes say that."""

    name: str
    instruction: Instruction
    spec: Spec | None

    @property
    def tree(self) -> str:
        """The name of the function's argument that it is a leaf of: `params` of `params['wq']`."""
        return re.split(r"[\[.]", self.name)[0]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A compiled program on a mesh, and what is known of how it was meant.

    mesh: every axis and its degree, outermost first. system: where times are to come from, None where it is not known.
    program: with memory, messages and the partitioner's texts; None of a bare HLO text. schedule: the simulated step,
    where the program's schedule is the one that will run. rules: regular expressions over
    the paths of arguments, each with the spec it should have, the first that matches. expected: the collectives that
    are meant to be there; None where nothing is said.
    """

    module: Module
    mesh: Mapping[str, int]
    system: System | None = None
    program: CompiledProgram | None = None
    schedule: Schedule | None = None
    rules: Rules = field(default_factory=dict)
    expected: tuple[Collective, ...] | None = None

    @cached_property
    def runs(self) -> ExecutionCounts:
        """How often each computation runs."""
        return count_executions(self.module)

    @cached_property
    def variance(self) -> Variance:
        """Along which axes each value differs."""
        return Variance(self.module, self.mesh)

    @cached_property
    def communicating(self) -> tuple[tuple[Instruction, tuple[Collective, ...]], ...]:
        """Every instruction that communicates, and its collectives as they are made."""
        return tuple(each_collective(self.module, self.mesh, self.runs))

    @cached_property
    def exposed_seconds(self) -> Mapping[str, float]:
        """The seconds a step that ops wait for each instruction of the schedule, by its name."""
        waits: defaultdict[str, float] = defaultdict(float)
        for event in self.schedule.events if self.schedule else ():
            waits[event.name] += event.exposed_seconds * event.count
        return waits

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every collective, in the words of a plan."""
        return tuple(
            Move(
                instruction=instruction, kind=entry.kind, collective=replace(one, seconds=self._seconds_of(entry, one))
            )
            for instruction, entries in self.communicating
            for entry in entries
            for one in canonicalize_collective(entry, self.mesh)
        )

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """The axes that split the first dim of data: of whole numbers (tokens), else of a tree that looks like a batch.

        Such a tree has leaves of one first dim, split alike, and none that is gathered, as stored weights are.
        """
        trees: dict[str, list[Argument]] = {}
        for argument in self.arguments:
            if len(argument.instruction.shape.dims) > 1:
                trees.setdefault(argument.tree, []).append(argument)
        tokens = [one for tree in trees.values() for one in tree if one.instruction.shape.dtype[:1] in "su"]
        gathered = {self.source_of(move).name for move in self.moves if move.collective.kind == "all-gather"}
        alike = [
            tree[0]
            for tree in trees.values()
            if len({(one.instruction.shape.dims[0], one.spec.dims[0] if one.spec else ()) for one in tree}) == 1
            and not gathered.intersection(one.instruction.name for one in tree)
        ]
        return frozenset(axis for one in tokens or alike if one.spec for axis in one.spec.dims[0] or ())

    def source_of(self, move: Move) -> Instruction:
        """What made the value that a collective moves, behind other layouts and dtypes and one layer of a stack."""
        return origin(self.module, self.module.operand(move.instruction), _STORED)

    def is_planned(self, kind: Kind, axes: Sequence[str], phase: Phase) -> bool:
        """Whether no more bytes go by a kind of collective over some axes in a phase than are meant to."""

        def moved(collectives: Iterable[Collective]) -> int:
            alike = (one for one in collectives if (one.kind, one.phase) == (kind, phase))
            return sum(one.bytes for one in alike if set(one.axes) == set(axes))

        return self.expected is not None and moved(move.collective for move in self.moves) <= moved(self.expected)

    @property
    def has_reduce_scatter(self) -> bool:
        """Whether the compiler of the system makes reduce-scatters; not said where the system is not."""
        return self.system is not None and self.system.chip.kind != "cpu"

    @cached_property
    def products(self) -> tuple[Work, ...]:
        """Every product that runs."""
        return tuple(self._products())

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the program in order."""
        parameters = self.module.computations[self.module.entry].parameters
        return tuple(self._argument(parameters[number]) for number in sorted(parameters))

    @cached_property
    def layout(self) -> Layout | None:
        """The mesh laid on the system; None where there is none."""
        return lay_mesh(self.system, self.mesh) if self.system else None

    def degree(self, axes: Sequence[str]) -> int:
        """The product of the degrees of some axes."""
        product = 1
        for axis in axes:
            product *= self.mesh[axis]
        return product

    def seconds_of(self, move: Collective) -> float | None:
        """The time of all runs of a collective on the fabric."""
        return self.collective_seconds(move.kind, move.bytes / move.count, move.axes, count=move.count)

    def collective_seconds(self, kind: Kind, size: float, axes: Sequence[str], *, count: int = 1) -> float | None:
        """The time of so many collectives of an array of `size` bytes; None where axes or fabric are not known."""
        if self.layout is None or not axes:
            return None
        return count * achieved_seconds(kind, size, self.layout, tuple(axes))

    def flop_seconds(self, flops: float) -> float | None:
        """The time of products at the peak of the chip, in the dtype it is built for."""
        if self.system is None:
            return None
        return flops / self.system.peak("f32" if self.system.chip.kind == "cpu" else "bf16")

    def place(self, instruction: Instruction, *, moves: bool = False) -> str:
        """Source and scopes of an instruction; `moves` of one that only moves data."""
        return describe(self.module, instruction, moves=moves)[0].place

    def _seconds_of(self, made: Collective, meant: Collective) -> float | None:
        """The time of a collective: of what is made where the compiler could have made what is meant."""
        return self.seconds_of(made if self.has_reduce_scatter else meant)

    def first_use(self, parameter: Instruction) -> str:
        """The place where the program first takes an argument."""
        places = (self.place(user, moves=True) for user in self.module.users(parameter))
        return next(filter(None, places), "")

    def _products(self) -> Iterator[Work]:
        """Each product with its flops."""
        for instruction in self.module.instructions():
            times = self.runs.times[instruction.computation]
            flops = (flops_of(self.module, instruction) or 0) * times
            if flops:
                yield Work(instruction=instruction, flops=flops)

    def _argument(self, parameter: Instruction) -> Argument:
        """One argument; the compiler escapes the quotes in its path."""
        return Argument(
            name=parameter.op_name.replace("\\'", "'") or parameter.name,
            instruction=parameter,
            spec=parse_hlo_sharding(parameter.attributes.get("sharding", ""), len(parameter.shape.dims), self.mesh),
        )
