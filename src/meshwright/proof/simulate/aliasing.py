"""Find which values of a compiled program share a buffer: through tuples, loops, calls and in-place updates.

The rules are those of XLA's own analyses (xla/hlo/analysis/hlo_dataflow_analysis.cc, hlo_alias_analysis.cc,
github.com/openxla/xla), and the compiler's annotations on instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.shapes import Shape

_VIEWS = frozenset({"bitcast", "opt-barrier", "domain", "add-dependency", "get-dimension-size"})
_ELEMENTWISE = frozenset(
    {"abs", "add", "and", "bitcast", "ceil", "clamp", "compare", "convert", "cosine", "divide", "exponential", "floor"}
    | {"exponential-minus-one", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply"}
    | {"negate", "not", "or", "power", "remainder", "round-nearest-even", "rsqrt", "select", "sign", "sine", "sqrt"}
    | {"subtract", "tanh", "xor"}
)
_TAKE_OVER = _ELEMENTWISE | {"fusion", "sort", "all-reduce", "all-reduce-start"}

_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_TPU_ALIASES = re.compile(r'"aliasing_operands":\{"lists":\[(.*?)\]\}[,}]')
_INDICES = re.compile(r'"indices":\[([\d",]*)\]')


class Leaf(NamedTuple):
    """One array of an instruction's result; `number` is its position among the arrays of the result's shape."""

    computation: str
    instruction: str
    number: int


class AliasSets:
    """Sets of leaves that share a buffer, as a union-find forest."""

    def __init__(self) -> None:
        self.parent: dict[Leaf, Leaf] = {}

    def find(self, leaf: Leaf) -> Leaf:
        """The representative of a leaf's set."""
        root = leaf
        while (above := self.parent.get(root, root)) != root:
            root = above
        while leaf != root:
            self.parent[leaf], leaf = root, self.parent.get(leaf, leaf)
        return root

    def join(self, left: Leaf, right: Leaf) -> None:
        """Merge the sets of two leaves."""
        first, second = self.find(left), self.find(right)
        if first != second:
            self.parent[second] = first


def alias_buffers(module: Module, computations: Iterable[str]) -> AliasSets:
    """Return the sets of leaves that share a buffer.

    computations: the names of those whose instructions run one by one (not those of fusions).
    """
    shared = AliasSets()
    for name in computations:
        for instruction in module.computations[name].instructions.values():
            for left, right in _aliases(module, instruction):
                shared.join(left, right)
    root, parameters = module.root(module.entry), module.computations[module.entry].parameters
    for output, parameter, path in parse_aliases(module.attributes.get("input_output_alias", "")):
        shared.join(_leaf_at(root, output), _leaf_at(parameters[parameter], path))
    return shared


def parse_aliases(text: str) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Parse `{0}: (2, {}), ...` into [(tuple indices of an output, operand's number, tuple indices in the operand)]."""
    return [(_path(output), int(operand), _path(path)) for output, operand, path in _ALIAS.findall(text)]


def reusable_operands(module: Module, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield pairs of a result leaf and the operand leaf whose memory it may reuse after the operand's last use.

    Possible where each element of the result depends on no other element of the operand: elementwise ops and fusions,
    and in-place ops. The CPU and GPU compilers do this; the TPU compiler shares only what it annotates.
    """
    if any(":T(" in array.layout for array in instruction.shape.arrays()) or instruction.opcode not in _TAKE_OVER:
        return
    operands = module.operands(instruction)
    if instruction.opcode != "fusion":
        yield from ((leaf, leaves(operand)[0]) for leaf, operand in zip(leaves(instruction), operands, strict=False))
        return
    for leaf, value in _fused_results(module, instruction):
        for index in _elementwise_sources(module, value):
            yield leaf, leaves(operands[index])[0]


def _fused_results(module: Module, fusion: Instruction) -> Iterator[tuple[Leaf, Instruction]]:
    """Yield each leaf of a fusion's result with the instruction inside the fusion that computes it."""
    root = module.root(fusion.called("calls")[0])
    yield from zip(leaves(fusion), module.operands(root) if root.opcode == "tuple" else (root,), strict=False)


def _elementwise_sources(module: Module, value: Instruction) -> list[int]:
    """Return the numbers of a fused computation's parameters from which a value is computed elementwise."""
    found, seen, waiting = [], {value.name}, [value]
    while waiting:
        made = waiting.pop()
        if made.opcode == "parameter":
            found.append(made.index)
        if made.opcode not in _ELEMENTWISE:
            continue
        for operand in module.operands(made):
            if operand.name not in seen and operand.shape.size == value.shape.size:
                seen.add(operand.name)
                waiting.append(operand)
    return found


def leaves(instruction: Instruction) -> list[Leaf]:
    """Return the leaves of an instruction's result, in order."""
    count = num_leaves(instruction.shape)
    return [Leaf(instruction.computation, instruction.name, number) for number in range(count)]


@lru_cache(maxsize=1 << 14)
def num_leaves(shape: Shape) -> int:
    """Return the number of arrays in a shape."""
    return sum(1 for _ in shape.arrays())


def _aliases(module: Module, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield pairs of leaves that share a buffer because of an instruction.

    Usually one leaf belongs to the instruction's result, the other to an operand.
    """
    opcode, own = instruction.opcode, leaves(instruction)
    if opcode == "tuple":
        yield from zip(own, _operand_leaves(module, instruction), strict=True)
    elif opcode == "get-tuple-element":
        yield from zip(own, _element_leaves(module.operand(instruction), instruction.index), strict=True)
    elif opcode in _VIEWS:
        yield from zip(own, leaves(module.operand(instruction)), strict=False)
    elif opcode in ("while", "call", "conditional"):
        yield from _call_aliases(module, instruction)
    elif opcode.endswith("-start") or opcode == "send":
        yield from _start_aliases(module, instruction)
    elif opcode.endswith("-done"):
        yield from zip(own, _done_leaves(module.operand(instruction)), strict=False)
    else:
        yield from _in_place_aliases(module, instruction)


def _call_aliases(module: Module, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield pairs of leaves that share a buffer across a loop, call or conditional.

    They are an operand and a parameter of the called computation, or the result and the computation's root.
    """
    own, operands = leaves(instruction), module.operands(instruction)
    if instruction.opcode == "while":
        yield from zip(own, leaves(operands[0]), strict=True)
    elif instruction.opcode == "call":
        name = instruction.called("to_apply")[0]
        for number, operand in enumerate(operands):
            yield from zip(leaves(module.computations[name].parameters[number]), leaves(operand), strict=True)
        yield from zip(own, leaves(module.root(name)), strict=True)
    else:
        for name, operand in zip(instruction.branches, operands[1:], strict=True):
            yield from zip(leaves(module.computations[name].parameters[0]), leaves(operand), strict=True)
            yield from zip(own, leaves(module.root(name)), strict=True)


def _start_aliases(module: Module, start: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield (result's leaf, operand's leaf) where the result tuple of an asynchronous start contains an operand.

    The operand's buffer therefore stays in use until the `-done`.
    """
    if start.opcode == "copy-start":
        yield from zip(_element_leaves(start, 1), leaves(module.operand(start)), strict=True)
    elif start.shape.elements:
        yield from zip(_element_leaves(start, 0), _operand_leaves(module, start), strict=False)
    if start.opcode == "dynamic-update-slice-start":
        yield from zip(_element_leaves(start, 1), leaves(module.operand(start)), strict=True)


def _done_leaves(start: Instruction) -> list[Leaf]:
    """Return the leaves of an asynchronous start that hold the result of its `-done`."""
    if start.opcode in ("copy-start", "recv"):
        return _element_leaves(start, 0)
    if start.opcode == "all-reduce-start" or len(start.shape.elements) < 2:
        return leaves(start)
    return _element_leaves(start, 1)


def _in_place_aliases(module: Module, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield (result's leaf, operand's leaf) for results that are written over an operand.

    They are found by opcode, by the compiler's annotations, and inside fusions.
    """
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        yield leaves(instruction)[0], leaves(module.operand(instruction))[0]
    for output, number, path in parse_aliases(instruction.attributes.get("output_to_operand_aliasing", "")):
        yield _leaf_at(instruction, output), _leaf_at(module.operand(instruction, number), path)
    yield from _tpu_aliases(module, instruction)
    if instruction.opcode == "fusion":
        for own, value in _fused_results(module, instruction):
            while value.opcode == "bitcast":
                value = module.operand(value)
            if value.opcode != "dynamic-update-slice":
                continue
            while value.opcode in ("bitcast", "dynamic-update-slice"):
                value = module.operand(value)
            if value.opcode == "parameter":
                yield own, leaves(module.operand(instruction, value.index))[0]


def _tpu_aliases(module: Module, instruction: Instruction) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield pairs of leaves that share a buffer according to the TPU compiler's annotation on an instruction.

    Leaves are those of the operands and of the result.
    """
    found = _TPU_ALIASES.search(instruction.attributes.get("backend_config", ""))
    if found is None:
        return
    every = [*_operand_leaves(module, instruction), *leaves(instruction)]
    for indices in _INDICES.findall(found[1]):
        numbers = [int(number) for number in re.findall(r"\d+", indices)]
        for number in numbers[1:]:
            if max(numbers[0], number) < len(every):
                yield every[numbers[0]], every[number]


def _operand_leaves(module: Module, instruction: Instruction) -> list[Leaf]:
    """Return the leaves of all operands, in order."""
    return [leaf for operand in module.operands(instruction) for leaf in leaves(operand)]


def _element_leaves(instruction: Instruction, index: int) -> list[Leaf]:
    """Return the leaves of element `index` of an instruction's result, a tuple."""
    elements = instruction.shape.elements
    first = sum(num_leaves(element) for element in elements[:index])
    return leaves(instruction)[first : first + num_leaves(elements[index])]


def _leaf_at(instruction: Instruction, path: tuple[int, ...]) -> Leaf:
    """Return the leaf of an instruction's result at a path of tuple indices."""
    shape, number = instruction.shape, 0
    for index in path:
        number += sum(num_leaves(element) for element in shape.elements[:index])
        shape = shape.elements[index]
    return Leaf(instruction.computation, instruction.name, number)


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
