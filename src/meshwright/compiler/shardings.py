"""Where every value of a program was asked to lie, and where the partitioner laid it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.compiler.program import CompiledProgram
from meshwright.hlo import (
    Instruction,
    Module,
    Shape,
    Spec,
    parse_hlo,
    parse_hlo_sharding,
    parse_shardy_sharding,
    scope_of,
)

Role = Literal["input", "output", "intermediate"]

_Place = tuple[str, str, str]

_SDY = re.compile(r'xla\.sdy\.sharding="((?:[^"\\]++|\\.)*+)"')
_SHARDING = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
_PRODUCTS = ("dot", "convolution")


@dataclass(frozen=True, kw_only=True)
class Laid:
    """One value of a program: its global shape, the spec it was asked to have and the one it got.

    name: the path of an input or an output in the arguments or the result; the scopes of an intermediate. wanted is
    None of a value that nothing was said of; got is None where it is in no mesh axes' terms.
    """

    name: str
    role: Role
    array: str
    wanted: Spec | None
    got: Spec | None
    source: str = ""

    @property
    def is_as_wanted(self) -> bool:
        """Whether it lies as it was asked to, or nothing was asked."""
        return self.wanted is None or (self.got is not None and self.wanted.allows(self.got))


def read_shardings(program: CompiledProgram, mesh: Mapping[str, int]) -> tuple[Laid, ...]:
    """Every input, output, constrained value and product of a program, each once: wanted and got.

    mesh: every axis and its degree in the order the devices are laid out in, outermost first. Empty for a program that
    was not partitioned. A constraint is what `reshard`, `with_sharding_constraint` and explicit types ask for.
    """
    if not (program.annotated and program.propagated):
        return ()
    asked, laid = parse_hlo(program.annotated), parse_hlo(program.propagated)
    found = [
        *_inputs(asked, laid, mesh),
        *_outputs(asked, laid, mesh, program.output_names),
        *_constrained(asked, laid, mesh),
        *_products(asked, laid, mesh),
    ]
    return tuple(dict.fromkeys(found))


def _inputs(asked: Module, laid: Module, mesh: Mapping[str, int]) -> Iterator[Laid]:
    """The parameters; those that the program does not use are not in it."""
    before = asked.computations[asked.entry].parameters
    for number, parameter in sorted(laid.computations[laid.entry].parameters.items()):
        wanted = _wanted(before[number], mesh) if number in before else None
        yield Laid(
            name=parameter.op_name or f"argument {number}",
            role="input",
            array=str(parameter.shape),
            wanted=wanted,
            got=_got(parameter, mesh),
        )


def _outputs(asked: Module, laid: Module, mesh: Mapping[str, int], names: tuple[str, ...]) -> Iterator[Laid]:
    """The results."""
    before, after = asked.root(asked.entry), laid.root(laid.entry)
    arrays = list(after.shape.arrays())
    wanted = _specs(before, list(before.shape.arrays()), mesh, unsaid="")
    got = _specs(after, arrays, mesh)
    for number, array in enumerate(arrays):
        yield Laid(
            name=names[number] if number < len(names) else f"result {number}",
            role="output",
            array=str(array),
            wanted=wanted[number] if number < len(wanted) else None,
            got=got[number],
        )


def _constrained(asked: Module, laid: Module, mesh: Mapping[str, int]) -> Iterator[Laid]:
    """The values that a constraint stands on, each beside the one that the partitioner made for the same place."""
    made: dict[_Place, list[Spec | None]] = defaultdict(list)
    for instruction in laid.instructions():
        if instruction.opcode == "copy":
            made[_place(instruction)].append(_got(instruction, mesh))
    constraints: dict[_Place, list[Instruction]] = defaultdict(list)
    for instruction in asked.instructions():
        if _is_constraint(instruction):
            constraints[_place(instruction)].append(instruction)
    for place, alike in constraints.items():
        specs = [_wanted(one, mesh) for one in alike]
        for one, wanted, got in zip(alike, specs, _matched(specs, made[place]), strict=True):
            yield _intermediate(one, wanted, got)


def _matched(wanted: list[Spec | None], made: list[Spec | None]) -> list[Spec | None]:
    """The spec that each constraint of one place got, of the values made there.

    One that changes nothing is dropped: what it stood on lies as asked. So which ones are left, what they ask says.
    """
    left, got = list(made), list(wanted)
    unmet: list[int] = []
    for number, one in enumerate(wanted):
        found = next((spec for spec in left if spec is not None and (one is None or one.allows(spec))), None)
        if found is None:
            unmet.append(number)
        else:
            left.remove(found)
            got[number] = found
    for number, spec in zip(unmet, left, strict=False):
        got[number] = spec
    return got


def _products(asked: Module, laid: Module, mesh: Mapping[str, int]) -> Iterator[Laid]:
    """The products whose results no constraint stands on: what propagation alone made of them."""
    constrained = {_place(asked.operand(one)) for one in asked.instructions() if _is_constraint(one)}
    for instruction in laid.instructions():
        if instruction.opcode in _PRODUCTS and _place(instruction) not in constrained:
            got = _got(instruction, mesh)
            if got is not None:  # not inside manual code, which says itself where its values lie
                yield _intermediate(instruction, None, got)


def _intermediate(instruction: Instruction, wanted: Spec | None, got: Spec | None) -> Laid:
    """What is said of a value inside the program."""
    return Laid(
        name=scope_of(instruction.op_name) or instruction.name,
        role="intermediate",
        array=str(instruction.shape),
        wanted=wanted,
        got=got,
        source=instruction.source,
    )


def _is_constraint(instruction: Instruction) -> bool:
    """Whether an instruction does nothing but ask for a sharding."""
    target = instruction.attributes.get("custom_call_target", "")
    return instruction.opcode == "custom-call" and target == '"Sharding"'


def _place(instruction: Instruction) -> _Place:
    """What tells a value in one module from those in the other, which numbers them anew."""
    return instruction.op_name, instruction.source, str(instruction.shape)


def _wanted(instruction: Instruction, mesh: Mapping[str, int]) -> Spec | None:
    """The spec that an instruction of the annotated module asks for; by axes where Shardy says it."""
    said = _SDY.search(instruction.attributes.get("frontend_attributes", ""))
    by_axes = parse_shardy_sharding(said[1], mesh) if said else None
    return by_axes or _specs(instruction, [instruction.shape], mesh, unsaid="")[0]


def _got(instruction: Instruction, mesh: Mapping[str, int]) -> Spec | None:
    """The spec of an instruction of the propagated module."""
    return _specs(instruction, [instruction.shape], mesh)[0]


def _specs(
    instruction: Instruction, arrays: list[Shape], mesh: Mapping[str, int], *, unsaid: str = "{replicated}"
) -> list[Spec | None]:
    """The spec of each array of an instruction; after propagation one of which nothing is said is whole everywhere."""
    text = instruction.attributes.get("sharding", "")
    of_tuple = instruction.shape.dtype == "tuple" and text.startswith("{{")
    texts = _SHARDING.findall(text[1:-1]) if of_tuple else [text or unsaid] * len(arrays)
    texts += [unsaid] * (len(arrays) - len(texts))
    return [parse_hlo_sharding(one, len(array.dims), mesh) for one, array in zip(texts, arrays, strict=False)]
