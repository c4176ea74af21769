"""Derive what an expression's sharding requires: the case of each mesh axis, and every implementation.

The results leave out axes of degree 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.cases import AxisCase, axis_cases
from meshwright.description.notation.expression import Chain, Expression, Stage
from meshwright.description.notation.implementations import implementations_of, sorted_implementations
from meshwright.description.notation.legality import Sizes, check
from meshwright.description.notation.names import default_result, with_distinct_labels
from meshwright.description.notation.reshard import communicate, reshard
from meshwright.description.notation.steps import Implementation, Step
from meshwright.errors import MeshwrightError


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What `infer` derives from an expression.

    Attributes:
        operands: those of the expression, with distinct labels; one for a resharding.
        result: the requested result; without one, that of `names.default_result`.
        cases: the case of each mesh axis that shards an operand (`notation.cases`); empty for a resharding.
        implementations: those with the fewest bytes sent per device first (`cost` sorts them by time on a chip);
            includes `prescribed`.
        prescribed: the implementation that the expression prescribes by naming a collective or an intermediate array,
            as `... -> RS over x -> ...` does; else None.
        sizes: the mesh, and the sizes of dims.
    """

    operands: tuple[ShardedArray, ...]
    result: ShardedArray
    cases: tuple[AxisCase, ...]
    implementations: tuple[Implementation, ...]
    prescribed: Implementation | None
    sizes: Sizes

    @property
    def case(self) -> int | None:
        """The highest case of any axis; 1 if no axis shards an operand; None for a resharding."""
        return max((item.case for item in self.cases), default=1) if len(self.operands) > 1 else None

    @property
    def implementation(self) -> Implementation:
        """The implementation that the expression prescribes, or else the one that sends the fewest bytes."""
        return self.prescribed or self.implementations[0]


def infer(expression: Expression, sizes: Sizes) -> Inference:
    """Derive the cases and implementations of an expression. Raises for a sharding that the mesh cannot have.

    >>> from meshwright.description.notation.parser import parse
    >>> sizes = Sizes(degrees={"X": 4}, dims={"I": 64, "J": 64, "K": 64})
    >>> print(infer(parse("A[I, J_X] @ B[J, K] -> C[I, K]"), sizes).implementation)
    AllGather_X(A[I, J_X]) -> A[I, J]; A[I, J] @ B[J, K] -> C[I, K]
    """
    if isinstance(expression, ShardedArray):
        raise MeshwrightError(f"{expression} is one array: write -> and the sharding wanted, or @ and another array")
    start, stages = (expression.start, expression.stages) if isinstance(expression, Chain) else (expression, ())
    if isinstance(start, ShardedArray):
        first = _checked(start, sizes)
        operands = (first,)
    else:
        operands = with_distinct_labels(tuple(_checked(operand, sizes) for operand in start.operands))
        first = _checked(start.result or default_result(operands), sizes)
    # The results of all stages get the name of the chain's first array.
    stages = tuple(
        Stage(stage.kind, _nontrivial(stage.axes, sizes), replace(_checked(stage.result, sizes), name=first.name))
        for stage in stages
    )
    result = stages[-1].result if stages else first
    implementations = implementations_of(operands, result, sizes)
    prescribed = None
    # An expression prescribes an implementation if it names a collective or has an intermediate array.
    if any(stage.kind for stage in stages) or len(stages) > 1 or (stages and len(operands) > 1):
        prescribed = _follow(implementations_of(operands, first, sizes)[0], stages, sizes)
        if prescribed not in implementations:
            implementations = sorted_implementations([*implementations, prescribed], sizes)
    cases = axis_cases(operands, result.dims) if len(operands) > 1 else ()
    return Inference(
        operands=operands,
        result=result,
        cases=cases,
        implementations=tuple(implementations),
        prescribed=prescribed,
        sizes=sizes,
    )


def _checked(array: ShardedArray, sizes: Sizes) -> ShardedArray:
    """Return an array without axes of degree 1. Raises an error if the array is not legal."""
    check(array, sizes)
    axes = tuple(_nontrivial(axes, sizes) for axes in array.axes)
    return replace(array, axes=axes, unreduced=_nontrivial(array.unreduced, sizes))


def _nontrivial(axes: tuple[str, ...], sizes: Sizes) -> tuple[str, ...]:
    """Return those of `axes` whose degree is above 1."""
    return tuple(axis for axis in axes if sizes.degrees[axis] > 1)


def _follow(start: Implementation, stages: tuple[Stage, ...], sizes: Sizes) -> Implementation:
    """Return the implementation `start` followed by the steps of a chain's stages."""
    current = start.result
    steps: list[Step] = list(start.steps)
    for stage in stages:
        if stage.kind is None or stage.kind == "all-gather":
            # An all-gather over axes of several dims is one collective per dim, as in resharding.
            steps.extend(reshard(current, stage.result, sizes))
        elif stage.axes:
            steps.append(communicate(stage.kind, stage.axes, current, stage.result, sizes))
        current = stage.result
    return Implementation(steps=tuple(steps), result=current)
