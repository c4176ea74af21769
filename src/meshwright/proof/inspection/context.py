"""`ProgramContext`, the input of all checks: a parsed program, and the costs of its matmuls and collectives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.hlo.collectives import each_collective
from meshwright.description.hlo.dataflow import VIEWS, origin
from meshwright.description.hlo.flops import flops_of
from meshwright.description.hlo.loops import ExecutionCounts, count_executions
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import describe
from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec, parse_hlo_sharding
from meshwright.description.hlo.updates import Share, Updates
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective_time import achieved_seconds
from meshwright.proof.compiler.program import CompiledProgram, TracedMistake
from meshwright.proof.compiler.shardings import ShardingPair, read_shardings
from meshwright.proof.inspection.variance import Variance
from meshwright.proof.simulate.schedule import Schedule
from meshwright.record import Collective, Kind, Phase

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_TREE = re.compile(r"args\[\d+\]|[^\[.]*")
STORED = frozenset(VIEWS | {"convert", "slice", "dynamic-slice", "broadcast"})
"""Ops whose result counts as the same stored value as their operand."""

Rules = Mapping[str, Sequence[str | Sequence[str] | None]]
"""{regular expression over argument paths: the mesh axes of each dim, as in a PartitionSpec}."""


@dataclass(frozen=True, kw_only=True)
class CompiledCollective:
    """A collective of a program.

    instruction: the HLO instruction. kind: its kind in the compiled program. collective: its canonical form
    (`hlo.canonical`), e.g. a reduce-scatter where XLA:CPU has an all-reduce and a slice.
    """

    instruction: Instruction
    kind: Kind
    collective: Collective


@dataclass(frozen=True, kw_only=True)
class MatmulFlops:
    """A matmul, and the flops of all its executions in a step on one device."""

    instruction: Instruction
    flops: int


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a program. name: its path. spec: its sharding; None where mesh axes cannot express it."""

    name: str
    instruction: Instruction
    spec: Spec | None

    @property
    def tree(self) -> str:
        """The function argument that has this leaf: `params` for `params['wq']`, or `args[0]` of `*args`."""
        found = _TREE.match(self.name)
        return found[0] if found else ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result of a program.

    name: its path. shape: its global shape. spec: its sharding; None where unknown. instruction: the HLO instruction
    with its value.
    """

    name: str
    shape: Shape
    spec: Spec | None
    instruction: Instruction


@dataclass(frozen=True, kw_only=True)
class ProgramContext:
    """A compiled program on a mesh, with the intended shardings and collectives as far as known."""

    module: Module
    mesh: Mapping[str, int]  # Degree of every axis, outermost first.
    system: System | None = None  # For times; None if unknown.
    # Collectives between slices, with their times; mesh and system then describe one slice.
    between_slices: tuple[Collective, ...] = ()
    # With memory, messages and the partitioner's modules; None for HLO text alone.
    program: CompiledProgram | None = None
    schedule: Schedule | None = None  # Simulated step, if the program's schedule is final.
    # Intended spec by regular expression over argument paths; the first match counts.
    rules: Rules = field(default_factory=dict)
    expected: tuple[Collective, ...] | None = None  # The intended collectives; None if unknown.
    # Names (`Argument.tree`) of the arguments whose new values a step returns; None: those that it computes updates of.
    state: tuple[str, ...] | None = None

    @cached_property
    def shardings(self) -> tuple[ShardingPair, ...]:
        """Each value's sharding, requested and actual; empty if nothing was partitioned."""
        return read_shardings(self.program, self.mesh) if self.program else ()

    @cached_property
    def results(self) -> tuple[Result, ...]:
        """The results in order; empty where the shardings of a program on several devices are unknown."""
        module = self._with_names.module
        root = module.root(module.entry)
        made = module.operands(root) if root.opcode == "tuple" else (root,)
        told = [(one.name, one.array, one.actual) for one in self.shardings if one.role == "output"]
        if not told and self.module.num_devices == 1:
            names = self.program.output_names if self.program else ()
            told = [(name, replace(one.shape, layout=""), None) for name, one in zip(names, made, strict=False)]
        return tuple(
            Result(name=name, shape=shape, spec=spec, instruction=one)
            for (name, shape, spec), one in zip(told, made, strict=False)
        )

    def traced(self, finding: str) -> Iterator[TracedMistake]:
        """Yield mistakes of one kind in the function's jaxpr; none for HLO text alone. finding: its `Finding.id`."""
        mistakes = (self.program.mistakes if self.program else None) or ()
        return (one for one in mistakes if one.finding == finding)

    @property
    def is_traced(self) -> bool:
        """Whether the function's jaxpr was read, which has more about `shard_map` than HLO."""
        return self.program is not None and self.program.mistakes is not None

    def check_state(self) -> None:
        """Raise if a name in `state` is not an argument. Unused arguments are not in a compiled program."""
        trees = dict.fromkeys(argument.tree for argument in self.arguments)
        for name in self.state or ():
            if name not in trees:
                raise MeshwrightError(f"state names {name!r}; the program's arguments are {', '.join(trees)}")

    def updates(self, result: Result) -> Mapping[int, Share]:
        """Return {argument number: `Share`} for the arguments of which a result is the new or the unchanged value.

        If the result is 0.9 * argument + other terms, the factor of that argument's `Share` is 0.9.
        """
        return self._with_names.of(result.instruction)

    def result_place(self, result: Result) -> str:
        """Return the source line and scopes of the op that computes a result."""
        return describe(self._with_names.module, result.instruction)[0].place

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """Numbers of arguments that JAX differentiates with respect to, or that the differentiated function reads."""
        return self._with_names.differentiated

    @cached_property
    def updated(self) -> frozenset[int]:
        """Numbers of the arguments that the program returns updated."""
        shares = (self.updates(result).items() for result in self.results)
        return frozenset(number for each in shares for number, share in each if share.is_changed)

    @cached_property
    def trained_trees(self) -> frozenset[str]:
        """The trees (`Argument.tree`) with an argument that the step updates and differentiates with respect to."""
        return frozenset(self.arguments[number].tree for number in self.updated & self.differentiated)

    @cached_property
    def _with_names(self) -> Updates:
        """The `Updates` of the module before optimization, whose ops have JAX's names; else of the compiled module."""
        text = self.program.annotated if self.program else ""
        return Updates(parse_hlo(text) if text else self.module)

    @cached_property
    def execution_counts(self) -> ExecutionCounts:
        """How often each computation runs."""
        return count_executions(self.module)

    @cached_property
    def variance(self) -> Variance:
        """Along which axes each value differs between devices."""
        return Variance(self.module, self.mesh)

    @cached_property
    def partitioned(self) -> ProgramContext:
        """This program after partitioning, before fusion and scheduling; `self` on CPUs, or if that module is unknown.

        At that stage the ops between two collectives are the same on every kind of device.
        """
        if self.program is None or not self.program.partitioned or not self.has_reduce_scatter:
            return self
        return replace(self, module=parse_hlo(self.program.partitioned), schedule=None)

    @cached_property
    def communicating_instructions(self) -> tuple[tuple[Instruction, tuple[Collective, ...]], ...]:
        """Every instruction that communicates, with its collectives as compiled."""
        return tuple(each_collective(self.module, self.mesh, self.execution_counts))

    @cached_property
    def exposed_seconds(self) -> Mapping[str, float]:
        """The exposed seconds per step of each instruction of the schedule, by name."""
        waits: defaultdict[str, float] = defaultdict(float)
        for event in self.schedule.events if self.schedule else ():
            waits[event.name] += event.exposed_seconds * event.count
        return waits

    @cached_property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """Every collective in canonical form, with its time.

        The time is that of the compiled collective if the compiler has a reduce-scatter, else of the canonical one.
        """
        return tuple(
            CompiledCollective(
                instruction=instruction,
                kind=entry.kind,
                collective=replace(one, seconds=self.seconds_of(entry if self.has_reduce_scatter else one)),
            )
            for instruction, entries in self.communicating_instructions
            for entry in entries
            for one in canonicalize_collective(entry, self.mesh)
        )

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that shard the first dim of data: of integer arrays (tokens), else of trees that look like a batch.

        The leaves of such a tree have equal first dims, sharded alike, and none is gathered like stored weights.
        """
        trees: dict[str, list[Argument]] = {}
        for argument in self.arguments:
            if len(argument.instruction.shape.dims) > 1:
                trees.setdefault(argument.tree, []).append(argument)
        tokens = [one for tree in trees.values() for one in tree if one.instruction.shape.dtype[:1] in "su"]
        alike = [
            tree[0]
            for tree in trees.values()
            if len({(one.instruction.shape.dims[0], one.spec.dims[0] if one.spec else ()) for one in tree}) == 1
            and not self.gathered.intersection(one.instruction.name for one in tree)
        ]
        return frozenset(axis for one in tokens or alike if one.spec for axis in one.spec.dims[0] or ())

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Names of the instructions and arguments whose values are all-gathered."""
        moves = (move for move in self.collectives if move.collective.kind == "all-gather")
        return frozenset(self.source_of(move).name for move in moves)

    @cached_property
    def is_train_step(self) -> bool:
        """Whether the program differentiates, judged by the op names that JAX gives to the backward pass."""
        return any("transpose(" in instruction.op_name for instruction in self.module.instructions())

    @cached_property
    def aliases(self) -> Mapping[int, int]:
        """{number of a result: number of the argument whose buffer it is written into}."""
        found = _ALIAS.findall(self.module.attributes.get("input_output_alias", ""))
        return {int(result or 0): int(argument) for result, argument in found}

    def whole_shape(self, argument: Argument) -> Shape:
        """Return the global shape of an argument."""
        shape = argument.instruction.shape
        dims = argument.spec.dims if argument.spec else ((),) * len(shape.dims)
        whole = tuple(size * self.degree(axes or ()) for size, axes in zip(shape.dims, dims, strict=True))
        return Shape(shape.dtype, whole)

    def source_of(self, move: CompiledCollective) -> Instruction:
        """Return the origin of a collective's operand, looking through copies, casts and slices of stacked layers."""
        return origin(self.module, self.module.operand(move.instruction), STORED)

    def is_expected(self, kind: Kind, axes: Sequence[str], phase: Phase) -> bool:
        """Whether the collectives of a kind, axes and phase move at most the bytes of those in `expected`."""

        def moved(collectives: Iterable[Collective]) -> int:
            alike = (one for one in collectives if (one.kind, one.phase) == (kind, phase))
            return sum(one.bytes for one in alike if set(one.axes) == set(axes))

        return self.expected is not None and moved(move.collective for move in self.collectives) <= moved(self.expected)

    @property
    def has_reduce_scatter(self) -> bool:
        """Whether the compiler of the system has a reduce-scatter; False where the system is not known."""
        return self.system is not None and self.system.chip.kind != "cpu"

    @cached_property
    def products(self) -> tuple[MatmulFlops, ...]:
        """Every matmul that is executed, with its flops."""
        times = self.execution_counts.times
        return tuple(
            MatmulFlops(instruction=instruction, flops=flops)
            for instruction in self.module.instructions()
            if (flops := (flops_of(self.module, instruction) or 0) * times[instruction.computation])
        )

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the program, in order."""
        parameters = self.module.computations[self.module.entry].parameters
        return tuple(
            Argument(
                name=one.op_name.replace("\\'", "'") or one.name,  # the compiler escapes the quotes in a path
                instruction=one,
                spec=parse_hlo_sharding(one.attributes.get("sharding", ""), len(one.shape.dims), self.mesh),
            )
            for _, one in sorted(parameters.items())
        )

    @cached_property
    def layout(self) -> MeshPlacement | None:
        """The placement of the mesh on the system; None where the system is not known."""
        return lay_mesh(self.system, self.mesh) if self.system else None

    def degree(self, axes: Sequence[str]) -> int:
        """Return the product of the degrees of some axes."""
        product = 1
        for axis in axes:
            product *= self.mesh[axis]
        return product

    def seconds_of(self, move: Collective) -> float | None:
        """Return the seconds of all executions of a collective in a step; None where axes or system are unknown."""
        return self.collective_seconds(move.kind, move.bytes / move.count, move.axes, count=move.count)

    def collective_seconds(self, kind: Kind, size: float, axes: Sequence[str], *, count: int = 1) -> float | None:
        """Return the seconds of `count` collectives on an array of `size` bytes; None if axes or system are unknown."""
        if self.layout is None or not axes:
            return None
        return count * achieved_seconds(kind, size, self.layout, tuple(axes))

    @property
    def no_seconds(self) -> float | None:
        """The seconds of a mistake that costs only memory: 0, or None if the system is unknown."""
        return 0.0 if self.system else None

    def flop_seconds(self, flops: float) -> float | None:
        """Return the seconds of matmuls at the chip's peak (bf16; f32 on CPUs); None where the system is unknown."""
        if self.system is None:
            return None
        return flops / self.system.peak("f32" if self.system.chip.kind == "cpu" else "bf16")

    def place(self, instruction: Instruction, *, moves: bool = False) -> str:
        """Return the source line and scopes of an instruction. moves: whether it only moves data (`describe`)."""
        return describe(self.module, instruction, moves=moves)[0].place

    def first_use(self, parameter: Instruction) -> str:
        """Return the source and scopes where the program first uses an argument; '' if unknown."""
        places = (self.place(user, moves=True) for user in self.module.users(parameter))
        return next((place for place in places if place and not place.startswith("(")), "")
