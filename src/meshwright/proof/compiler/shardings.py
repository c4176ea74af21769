"""The sharding requested for each value of a program, and the actual one from the partitioner."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import scope_of
from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec, parse_hlo_sharding, parse_shardy_sharding
from meshwright.proof.compiler.program import CompiledProgram

Role = Literal["input", "output", "intermediate"]

_Place = tuple[str, str, str]

_SDY = re.compile(r'xla\.sdy\.sharding="((?:[^"\\]++|\\.)*+)"')
_SHARDING = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
_PRODUCTS = ("dot", "convolution")
_CONSTRAINT = "Sharding"


@dataclass(frozen=True, kw_only=True)
class ShardingPair:
    """A value of a program with its requested and its actual sharding.

    name: an input's pytree path in the arguments, an output's in the result, or an intermediate's named scopes. array:
    its global shape. requested: None where nothing was requested. actual: None where mesh axes cannot express the
    sharding.
    """

    name: str
    role: Role
    array: Shape
    requested: Spec | None
    actual: Spec | None
    source: str = ""

    @property
    def is_satisfied(self) -> bool:
        """Whether the actual sharding is the requested one, or nothing was requested."""
        return self.requested is None or (self.actual is not None and self.requested.allows(self.actual))


def read_shardings(program: CompiledProgram, mesh: Mapping[str, int]) -> tuple[ShardingPair, ...]:
    """Return the shardings of a program's inputs, outputs, constrained values and matmuls, each once.

    mesh: every axis and its degree in device order, outermost first. The result is empty for a program that was not
    partitioned. `reshard`, `with_sharding_constraint` and explicit types all become constraints.
    """
    if not (program.annotated and program.propagated):
        return ()
    annotated, propagated = parse_hlo(program.annotated), parse_hlo(program.propagated)
    found = [
        *_inputs(annotated, propagated, mesh),
        *_outputs(annotated, propagated, mesh, program.output_names),
        *_constraints(annotated, propagated, mesh),
        *_products(annotated, propagated, mesh),
    ]
    return tuple(dict.fromkeys(found))


def _inputs(annotated: Module, propagated: Module, mesh: Mapping[str, int]) -> Iterator[ShardingPair]:
    """Yield a pair for each argument of the program; unused arguments are not in the module and have none."""
    before = annotated.computations[annotated.entry].parameters
    for number, parameter in sorted(propagated.computations[propagated.entry].parameters.items()):
        requested = _requested(before[number], mesh) if number in before else None
        yield ShardingPair(
            name=parameter.op_name or f"argument {number}",
            role="input",
            array=replace(parameter.shape, layout=""),
            requested=requested,
            actual=_actual(parameter, mesh),
        )


def _outputs(
    annotated: Module, propagated: Module, mesh: Mapping[str, int], names: tuple[str, ...]
) -> Iterator[ShardingPair]:
    """Yield a pair for each result of the program. names: the pytree path of each result."""
    before, after = annotated.root(annotated.entry), propagated.root(propagated.entry)
    arrays = list(after.shape.arrays())
    requested = _specs(before, list(before.shape.arrays()), mesh, default="")
    actual = _specs(after, arrays, mesh)
    for number, array in enumerate(arrays):
        yield ShardingPair(
            name=names[number] if number < len(names) else f"result {number}",
            role="output",
            array=replace(array, layout=""),
            requested=requested[number] if number < len(requested) else None,
            actual=actual[number],
        )


def _constraints(annotated: Module, propagated: Module, mesh: Mapping[str, int]) -> Iterator[ShardingPair]:
    """Yield a pair for each sharding constraint.

    The partitioner replaces a constraint by a copy op, whose sharding is the actual one.
    """
    made: dict[_Place, list[Spec | None]] = defaultdict(list)
    for instruction in propagated.instructions():
        if instruction.opcode == "copy":
            made[_place(instruction)].append(_actual(instruction, mesh))
    constraints: dict[_Place, list[Instruction]] = defaultdict(list)
    for instruction in annotated.instructions():
        if instruction.custom_call_target == _CONSTRAINT:
            constraints[_place(instruction)].append(instruction)
    for place, alike in constraints.items():
        specs = [_requested(one, mesh) for one in alike]
        for one, requested, actual in zip(alike, specs, _match_constraints(specs, made[place]), strict=True):
            yield _intermediate(one, requested, actual)


def _match_constraints(requested: list[Spec | None], copies: list[Spec | None]) -> list[Spec | None]:
    """Return the actual spec of each constraint on one value.

    requested: the spec of each constraint. copies: the spec of each copy op that replaces a constraint on this value.

    A constraint is matched with a copy that has the requested spec, else with a remaining copy. If no copy remains, the
    partitioner dropped the constraint because it changed nothing: the actual spec is then the requested one.
    """
    left, actual = list(copies), list(requested)
    unmet: list[int] = []
    for number, one in enumerate(requested):
        found = next((spec for spec in left if spec is not None and (one is None or one.allows(spec))), None)
        if found is None:
            unmet.append(number)
        else:
            left.remove(found)
            actual[number] = found
    for number, spec in zip(unmet, left, strict=False):
        actual[number] = spec
    return actual


def _products(annotated: Module, propagated: Module, mesh: Mapping[str, int]) -> Iterator[ShardingPair]:
    """Yield a pair for each matmul or convolution whose result has no constraint: only propagation shards it."""
    constrained = {
        _place(annotated.operand(one)) for one in annotated.instructions() if one.custom_call_target == _CONSTRAINT
    }
    for instruction in propagated.instructions():
        if instruction.opcode in _PRODUCTS and _place(instruction) not in constrained:
            actual = _actual(instruction, mesh)
            if actual is not None:  # code in a shard_map has no sharding
                yield _intermediate(instruction, None, actual)


def _intermediate(instruction: Instruction, requested: Spec | None, actual: Spec | None) -> ShardingPair:
    return ShardingPair(
        name=scope_of(instruction.op_name) or instruction.name,
        role="intermediate",
        array=replace(instruction.shape, layout=""),
        requested=requested,
        actual=actual,
        source=instruction.source,
    )


def _place(instruction: Instruction) -> _Place:
    """Return (op_name, source, shape), which identifies a value in both modules; instruction names differ."""
    return instruction.op_name, instruction.source, str(instruction.shape)


def _requested(instruction: Instruction, mesh: Mapping[str, int]) -> Spec | None:
    """Return the spec that an instruction of the annotated module requests; None if it requests none.

    It is read from Shardy's attribute where the instruction has one.
    """
    said = _SDY.search(instruction.attributes.get("frontend_attributes", ""))
    by_axes = parse_shardy_sharding(said[1], mesh) if said else None
    return by_axes or _specs(instruction, [instruction.shape], mesh, default="")[0]


def _actual(instruction: Instruction, mesh: Mapping[str, int]) -> Spec | None:
    """Return the spec of an instruction of the propagated module; None if mesh axes cannot express it."""
    return _specs(instruction, [instruction.shape], mesh)[0]


def _specs(
    instruction: Instruction, arrays: list[Shape], mesh: Mapping[str, int], *, default: str = "{replicated}"
) -> list[Spec | None]:
    """Return the spec of each array of an instruction. default: the text of the sharding where none is printed."""
    text = instruction.attributes.get("sharding", "")
    of_tuple = instruction.shape.dtype == "tuple" and text.startswith("{{")
    texts = _SHARDING.findall(text[1:-1]) if of_tuple else [text or default] * len(arrays)
    texts += [default] * (len(arrays) - len(texts))
    return [parse_hlo_sharding(one, len(array.dims), mesh) for one, array in zip(texts, arrays, strict=False)]
