"""Find the mesh axes along which each value may differ between devices.

Along other axes, devices hold replicas or repeat work. An axis is left out only where the program shows that devices
along it hold the same value.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np

from meshwright.description.hlo.collectives import groups_of
from meshwright.description.hlo.evaluation import evaluate
from meshwright.description.hlo.groups import axes_of_groups
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.specs import parse_hlo_sharding

Axes = frozenset[str]

Value = Axes | tuple["Value", ...]
"""Axes along which an array may differ between devices, or those of each element of a tuple."""

_SAME: Axes = frozenset()
_CALLS = ("fusion", "call", "async-start")
_MADE_EQUAL = ("all-gather", "all-reduce", "collective-broadcast")
_SPREADS = ("reduce-scatter", "all-to-all", "ragged-all-to-all")
_ANYTHING = ("rng", "infeed", "recv", "replica-id", "partition-id")
_SMALL = 64
"""Integer arrays of up to this many elements are taken as indices and evaluated on every device."""


class Variance:
    """The mesh axes along which the result of each instruction may differ between devices, in any execution."""

    def __init__(self, module: Module, mesh: Mapping[str, int]) -> None:
        self.module = module
        self.mesh = {axis: degree for axis, degree in mesh.items() if degree > 1}
        self._every = frozenset(self.mesh)
        self._found: dict[tuple[str, str], Axes] = {}
        self._returned: dict[tuple[str, tuple[Value, ...]], Value] = {}
        parameters = module.computations[module.entry].parameters
        self._run(module.entry, tuple(self._argument(one) for _, one in sorted(parameters.items())))

    def axes(self, instruction: Instruction) -> Axes:
        """The axes along which a result may differ; all axes for an instruction that never runs."""
        return self._found.get((instruction.computation, instruction.name), self._every)

    def copies(self, instruction: Instruction) -> tuple[str, ...]:
        """The axes along which all devices compute the same result, in the mesh's order."""
        return tuple(axis for axis in self.mesh if axis not in self.axes(instruction))

    def _argument(self, parameter: Instruction) -> Value:
        """Return the axes that shard a program argument; all axes where its sharding is not known."""
        spec = parse_hlo_sharding(parameter.attributes.get("sharding", ""), len(parameter.shape.dims), self.mesh)
        if spec is None or parameter.shape.dtype == "tuple" or spec.unreduced:
            return self._every
        return frozenset(axis for dim in spec.dims for axis in dim or ())

    def _run(self, name: str, arguments: tuple[Value, ...]) -> Value:
        """Propagate the arguments' axes through a computation; return the axes of its result."""
        if (name, arguments) in self._returned:
            return self._returned[name, arguments]
        computation = self.module.computations[name]
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            operands = [values[operand] for operand in instruction.operands]
            values[instruction.name] = value = self._value(instruction, operands, arguments)
            key = (name, instruction.name)
            self._found[key] = self._found.get(key, _SAME) | _flatten(value)
        self._returned[name, arguments] = values[computation.root]
        return values[computation.root]

    def _value(self, instruction: Instruction, operands: list[Value], arguments: tuple[Value, ...]) -> Value:
        """Return the axes along which an instruction's result may differ.

        operands: the axes of each of its operands. arguments: the axes of each argument of its computation.
        """
        opcode = instruction.opcode
        if opcode == "parameter":
            return arguments[instruction.index] if instruction.index < len(arguments) else self._every
        if opcode in ("tuple", "opt-barrier"):
            return tuple(operands) if opcode == "tuple" else operands[0]
        if opcode == "get-tuple-element":
            return operands[0][instruction.index] if isinstance(operands[0], tuple) else operands[0]
        if opcode in _CALLS and (called := instruction.called("calls", "to_apply")):
            return self._run(called[0], tuple(operands))
        if opcode == "while":
            # Each iteration can add axes, so the body is evaluated until it adds none.
            state = operands[0]
            while True:
                trip = _join(state, self._run(instruction.called("body")[0], (state,)))
                if trip == state:
                    break
                state = trip
            going_on = _flatten(self._run(instruction.called("condition")[0], (state,)))
            return _add_axes(state, going_on)
        if opcode == "conditional":
            branches = zip(instruction.branches, operands[1:], strict=False)
            made = reduce(_join, [self._run(name, (operand,)) for name, operand in branches])
            return _add_axes(made, _flatten(operands[0]))  # devices may take different branches
        if opcode in _ANYTHING:
            return self._every
        return self._computed(instruction, operands)

    def _computed(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Return the axes along which an op's result may differ, if the op is a collective or depends on operands only.

        operands: the axes of each operand. Small integer arrays that depend only on the device's id are evaluated on
        every device.
        """
        kind = instruction.opcode.removesuffix("-start")
        if kind == "collective-permute":
            # Also axes along which only some devices receive anything.
            axes = _union(operands)
            degrees = tuple(self.mesh.values())
            sources = np.full(self.module.num_devices, -1)
            for source, target in groups_of(instruction, self.mesh):
                sources[target] = source
            places = np.stack(np.unravel_index(np.maximum(sources, 0), degrees), axis=1)
            seen = places * [axis in axes for axis in self.mesh]
            return self._differing(np.where(sources[:, None] < 0, -1, seen))
        if kind in _MADE_EQUAL or kind in _SPREADS:
            found = axes_of_groups(groups_of(instruction, self.mesh), self.mesh)
            along = None if found is None else frozenset(found)
            if kind in _SPREADS:
                return _union(operands) | (self._every if along is None else along)
            equal = [_flatten(operand) - (along or _SAME) for operand in operands]
            started = instruction.opcode.endswith("-start")
            return _union(equal) if len(equal) == 1 or started else tuple(equal)
        axes, shape = _union(operands), instruction.shape
        if axes and shape.dtype[:1] in ("s", "u", "p") and shape.size <= _SMALL:
            values = evaluate(self.module, instruction, self.module.num_devices)
            if values is not None:  # the device's id alone decides them
                return self._differing(np.asarray(values))
        return axes

    def _differing(self, values: np.ndarray) -> Axes:
        """Return the axes along which values, with one row per device, differ between any two devices."""
        grid = values.reshape(*self.mesh.values(), -1)
        return frozenset(
            axis for number, axis in enumerate(self.mesh) if (grid != np.take(grid, [0], axis=number)).any()
        )


def _flatten(value: Value) -> Axes:
    """Return the axes along which any array in a value may differ."""
    return value if isinstance(value, frozenset) else _union(value)


def _union(values: list[Value] | list[Axes] | tuple[Value, ...]) -> Axes:
    return _SAME.union(*(_flatten(value) for value in values))


def _join(left: Value, right: Value) -> Value:
    """Join the axes of two alternatives of a value: each element may differ where either does."""
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return tuple(_join(one, other) for one, other in zip(left, right, strict=True))
    return _flatten(left) | _flatten(right)


def _add_axes(value: Value, axes: Axes) -> Value:
    return tuple(_add_axes(one, axes) for one in value) if isinstance(value, tuple) else value | axes
