"""Derive the case of an expression and every implementation of it.

Results leave out axes of degree 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.cases import AxisCase, axis_cases
from meshwright.description.notation.expression import Chain, Expression, Stage
from meshwright.description.notation.implementations import implementations_of, sorted_implementations
from meshwright.description.notation.legality import Sizes, check
from meshwright.description.notation.names import natural_result, with_distinct_labels
from meshwright.description.notation.reshard import communicate, reshard
from meshwright.description.notation.steps import Implementation, Step
from meshwright.errors import MeshwrightError


@dataclass(frozen=True, kw_only=True)
class Inference:
    """The case of an expression for each mesh axis, and the implementations of its result.

    Attributes:
        operands: as written, with distinct labels; one for a resharding.
        result: the requested result, or the natural one, in which each dim keeps its axes.
        implementations: by bytes sent per device, fewest first (`cost` sorts them by time on a chip); includes
            `written`.
        written: the implementation that the expression prescribes, as `... -> RS over x -> ...` does; else None.
    """

    operands: tuple[ShardedArray, ...]
    result: ShardedArray
    cases: tuple[AxisCase, ...]
    implementations: tuple[Implementation, ...]
    written: Implementation | None
    sizes: Sizes

    @property
    def case(self) -> int | None:
        """The highest case of any axis; 1 if no axis shards anything, None for a resharding."""
        return max((item.case for item in self.cases), default=1) if len(self.operands) > 1 else None

    @property
    def implementation(self) -> Implementation:
        """The implementation that the expression prescribes, or else the one that sends the fewest bytes."""
        return self.written or self.implementations[0]


def infer(expression: Expression, sizes: Sizes) -> Inference:
    """Derive the case of an expression and its implementations. Raises for a sharding that the mesh cannot have.

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
        first = _checked(start.result or natural_result(operands), sizes)
    # Every stage's result gets the name of the chain's first array.
    stages = tuple(
        Stage(stage.kind, _nontrivial(stage.axes, sizes), replace(_checked(stage.result, sizes), name=first.name))
        for stage in stages
    )
    result = stages[-1].result if stages else first
    implementations = implementations_of(operands, result, sizes)
    written = None
    # A named collective or an intermediate array prescribes an implementation.
    if any(stage.kind for stage in stages) or len(stages) > 1 or (stages and len(operands) > 1):
        written = _follow(implementations_of(operands, first, sizes)[0], stages, sizes)
        if written not in implementations:
            implementations = sorted_implementations([*implementations, written], sizes)
    cases = axis_cases(operands, result.dims) if len(operands) > 1 else ()
    return Inference(
        operands=operands,
        result=result,
        cases=cases,
        implementations=tuple(implementations),
        written=written,
        sizes=sizes,
    )


def _checked(array: ShardedArray, sizes: Sizes) -> ShardedArray:
    """Return an array without axes of degree 1. Raises an error if the array is not legal."""
    check(array, sizes)
    axes = tuple(_nontrivial(axes, sizes) for axes in array.axes)
    return replace(array, axes=axes, unreduced=_nontrivial(array.unreduced, sizes))


def _nontrivial(axes: tuple[str, ...], sizes: Sizes) -> tuple[str, ...]:
    """Return the axes of a degree above 1."""
    return tuple(axis for axis in axes if sizes.degrees[axis] > 1)


def _follow(start: Implementation, stages: tuple[Stage, ...], sizes: Sizes) -> Implementation:
    """Return an implementation extended by the stages of a chain."""
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
