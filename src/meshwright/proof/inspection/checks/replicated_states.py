"""Optimizer states and averages that are not sharded like their parameters."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec
from meshwright.proof.inspection.checks.unexpected_collectives import UnexpectedCollective
from meshwright.proof.inspection.context import Argument, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined, num_elements
from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class ReplicatedStates(Finding):
    """Arrays of a tree that are replicated along axes that split the parameter of the same path and shape.

    name, shape: those of the largest array. like: the name of its parameter.
    """

    kind = FindingKind.REPLICATED_STATES

    tree: str
    name: str
    shape: Shape
    like: str
    count: int
    axes: tuple[str, ...]
    degree: int

    def _sentences(self) -> tuple[str, str]:
        many = f"{self.count} arrays of {self.tree}, as {self.name} {self.shape}," if self.count > 1 else self.name
        has = "have" if self.count > 1 else f"{self.shape} has"
        return (
            f"{many} {has} a copy on each of {self.degree} devices along {joined(self.axes)}, which splits {self.like}:"
            f" {show_bytes(self.bytes)} a device held for nothing",
            "make the optimizer's state from parameters that are split already, or give it their shardings: jit of"
            " optimizer.init with out_shardings",
        )


@dataclass(frozen=True, kw_only=True)
class MislaidState(Finding):
    """Arrays of a tree that are sharded differently from the parameter of the same path and shape.

    name, shape, spec: those of the largest array. like, expected: its parameter's name and sharding.
    """

    kind = FindingKind.MISLAID_STATE

    tree: str
    name: str
    shape: Shape
    spec: Spec
    like: str
    expected: Spec
    count: int
    axes: tuple[str, ...]

    def explains(self, other: Finding) -> bool:
        """Whether `other` is a collective that moves values between the state's and the parameter's sharding."""
        if not isinstance(other, UnexpectedCollective) or not other.is_of_shardings:
            return False
        return num_elements(other.array) >= math.prod(self.shape.dims) and (
            not other.axes or bool(set(other.axes) & set(self.axes))
        )

    def _sentences(self) -> tuple[str, str]:
        more = f", and {self.count - 1} more of {self.tree}," if self.count > 1 else ""
        return (
            f"{self.name} {self.shape}{more} is sharded as {self.spec}, its parameter {self.like} as {self.expected}:"
            f" {show_bytes(self.bytes)} a device move between the two in each step",
            "give the state its parameter's sharding, which may be split further but not otherwise: jit of"
            " optimizer.init with out_shardings, or jax.device_put(state, …) before the first step",
        )


def mislaid_states(context: ProgramContext) -> Iterator[Finding]:
    """Yield, for each tree, the states that split other dims than their parameters."""
    found: defaultdict[str, list[tuple[Argument, Argument]]] = defaultdict(list)
    for number, state in enumerate(context.arguments):
        is_state = number in context.updated and number not in context.differentiated
        parameter = (_parameter_of(context, state) or _trained_with(context, number, state)) if is_state else None
        if parameter is not None and not _missing(context, state, parameter) and _is_mislaid(context, state, parameter):
            found[state.tree].append((state, parameter))
    for tree, pairs in found.items():
        largest, like = max(pairs, key=lambda pair: pair[0].instruction.shape.bytes)
        assert largest.spec is not None
        assert like.spec is not None
        axes = tuple(axis for axis in context.mesh if axis in (*largest.spec.axes, *like.spec.axes))
        size = sum(state.instruction.shape.bytes for state, _ in pairs)
        yield MislaidState(
            tree=tree,
            name=largest.name,
            shape=largest.instruction.shape,
            spec=largest.spec,
            like=like.name,
            expected=like.spec,
            count=len(pairs),
            axes=axes,
            bytes=size,
            cost_seconds=context.collective_seconds("all-to-all", size * context.degree(axes), axes),
            source=context.first_use(largest.instruction),
        )


def _is_mislaid(context: ProgramContext, state: Argument, parameter: Argument) -> bool:
    """Whether an axis that splits a dim of a parameter splits another dim of its state, or none."""
    if state.spec is None or parameter.spec is None:
        return False
    pairs = zip(state.spec.dims, parameter.spec.dims, strict=True)
    return any(context.mesh[axis] > 1 and axis not in (mine or ()) for mine, its in pairs for axis in its or ())


def replicated_states(context: ProgramContext) -> Iterator[Finding]:
    """Yield a finding for each tree of optimizer state with arrays that an axis copies and splits their parameter."""
    found: defaultdict[tuple[str, tuple[str, ...]], list[tuple[Argument, Argument]]] = defaultdict(list)
    for number, state in enumerate(context.arguments):
        parameter = _parameter_of(context, state) or _trained_with(context, number, state)
        if parameter is not None and (axes := _missing(context, state, parameter)):
            found[state.tree, axes].append((state, parameter))
    for (tree, axes), pairs in found.items():
        largest, like = max(pairs, key=lambda pair: pair[0].instruction.shape.bytes)
        held, degree = sum(state.instruction.shape.bytes for state, _ in pairs), context.degree(axes)
        yield ReplicatedStates(
            tree=tree,
            name=largest.name,
            shape=largest.instruction.shape,
            like=like.name,
            count=len(pairs),
            axes=axes,
            degree=degree,
            bytes=held - held // degree,
            cost_seconds=context.no_seconds,
            source=context.first_use(largest.instruction),
        )


def replicated_names(context: ProgramContext) -> frozenset[str]:
    """Return the names of all arguments that are replicated optimizer states of a train step."""
    pairs = ((state, _trained_with(context, number, state)) for number, state in enumerate(context.arguments))
    return frozenset(state.name for state, parameter in pairs if parameter and _missing(context, state, parameter))


def _parameter_of(context: ProgramContext, state: Argument) -> Argument | None:
    """Return the parameter of an optimizer state, in an earlier tree of the arguments; None if there is none.

    The parameter has the state's global shape, and its path is a suffix of the state's path. Replicated parameters with
    split states are not a mistake: that is ZeRO stage 1.
    """
    for other in context.arguments:
        if other.tree == state.tree:
            return None
        if _is_hidden(other):
            continue
        path = other.name.removeprefix(other.tree)
        if path and state.name.endswith(path) and context.whole_shape(other).dims == context.whole_shape(state).dims:
            return other
    return None


def _trained_with(context: ProgramContext, number: int, state: Argument) -> Argument | None:
    """Return the parameter of an optimizer state, argument `number`, in any tree; None for other arguments.

    A state is an argument that the step updates and does not differentiate with respect to. Its parameter has the same
    global shape, and a path that ends alike. Where there are no paths (parameters that are arguments themselves;
    `nnx.jit` and `eqx.filter_jit` hide paths), all parameters of that shape must be split alike, or for a state that is
    not split at all over the same axes.
    """
    if number in context.differentiated or number not in context.updated:
        return None
    alike = [
        other
        for each in sorted(context.differentiated & context.updated)
        if context.whole_shape(other := context.arguments[each]).dims == context.whole_shape(state).dims
    ]
    path = _parts(state.name)
    is_named = not _is_hidden(state)
    named = [other for other in alike if is_named and (end := _parts(other.name)[2:]) and path[-len(end) :] == end]
    if named:
        return named[0]
    if is_named and not all(other.name == other.tree for other in alike):
        return None
    specs = {other.spec for other in alike}
    is_copied = state.spec is not None and not state.spec.axes
    is_clear = len({frozenset(spec.axes) if spec else None for spec in specs} if is_copied else specs) == 1
    return alike[0] if is_clear else None


def _is_hidden(argument: Argument) -> bool:
    """Whether a name has the number of a leaf instead of its path, as `nnx.jit` and `eqx.filter_jit` pass leaves."""
    return ".states[" in argument.name or argument.name.startswith(("dynamic_donate[", "dynamic_nodonate["))


def _parts(name: str) -> list[str]:
    """Split a path into its parts: state, params, w for `state.params['w']`."""
    return re.findall(r"[^\[\].']+", name)


def _missing(context: ProgramContext, state: Argument, parameter: Argument) -> tuple[str, ...]:
    """Return the axes that split a parameter but not its state; () if any axis splits the state."""
    if state.spec is None or parameter.spec is None or state.spec.axes:
        return ()
    return tuple(axis for axis in parameter.spec.axes if context.mesh[axis] > 1)
