"""From an expression to the case it is and to every way to compute it.

Axes of degree 1 split nothing and are left out of everything inferred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.errors import MeshwrightError
from meshwright.notation.array import ShardedArray
from meshwright.notation.cases import AxisCase, axis_cases
from meshwright.notation.expression import Chain, Expression, Stage
from meshwright.notation.implementations import implementations_of, sorted_implementations
from meshwright.notation.legality import Sizes, check
from meshwright.notation.names import natural_result, with_distinct_labels
from meshwright.notation.reshard import communicate, reshard
from meshwright.notation.steps import Implementation, Step


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What an expression is and takes: its case axis by axis, and the implementations that lead to its result.

    operands: as written, labels made distinct; one where an array is only resharded. result: what was asked for, or the
    natural result, in which each dim keeps the axes that it came with. implementations: fewest bytes sent by a device
    first (`cost` sorts them by time on a chip), the written one among them. written: the one that the expression itself
    prescribes, as `... -> RS over x -> ...` does; None where it leaves that open.
    """

    operands: tuple[ShardedArray, ...]
    result: ShardedArray
    cases: tuple[AxisCase, ...]
    implementations: tuple[Implementation, ...]
    written: Implementation | None
    sizes: Sizes

    @property
    def case(self) -> int | None:
        """The highest case of any axis; 1 where no axis splits anything, None where nothing is multiplied."""
        return max((item.case for item in self.cases), default=1) if len(self.operands) > 1 else None

    @property
    def implementation(self) -> Implementation:
        """The written one, or the one that sends the fewest bytes."""
        return self.written or self.implementations[0]


def infer(expression: Expression, sizes: Sizes) -> Inference:
    """The case of an expression and every way to its result. Raises for arrays that cannot lie on the mesh.

    >>> from meshwright.notation.parser import parse
    >>> sizes = Sizes(degrees={"X": 4}, dims={"I": 64, "J": 64, "K": 64})
    >>> print(infer(parse("A[I, J_X] @ B[J, K] -> C[I, K]"), sizes).implementation)
    AllGather_X(A[I, J_X]) -> A[I, J]; A[I, J] @ B[J, K] -> C[I, K]
    """
    if isinstance(expression, ShardedArray):
        raise MeshwrightError(f"{expression} is one array: write -> and the sharding wanted, or @ and another array")
    start, stages = (expression.start, expression.stages) if isinstance(expression, Chain) else (expression, ())
    if isinstance(start, ShardedArray):
        first = _normal(start, sizes)
        operands = (first,)
    else:
        operands = with_distinct_labels(tuple(_normal(operand, sizes) for operand in start.operands))
        first = _normal(start.result or natural_result(operands), sizes)
    # The result of each stage has the name of the array that goes through the chain.
    stages = tuple(
        Stage(stage.kind, _larger(stage.axes, sizes), replace(_normal(stage.result, sizes), name=first.name))
        for stage in stages
    )
    result = stages[-1].result if stages else first
    ways = implementations_of(operands, result, sizes)
    written = None
    if _prescribes(stages, operands):
        written = _follow(implementations_of(operands, first, sizes)[0], stages, sizes)
        ways = ways if written in ways else sorted_implementations([*ways, written], sizes)
    cases = axis_cases(operands, result.dims) if len(operands) > 1 else ()
    return Inference(
        operands=operands, result=result, cases=cases, implementations=tuple(ways), written=written, sizes=sizes
    )


def _prescribes(stages: tuple[Stage, ...], operands: tuple[ShardedArray, ...]) -> bool:
    """Whether stages say how, not only what: a collective by name, or an array on the way."""
    return any(stage.kind for stage in stages) or len(stages) > 1 or bool(stages and len(operands) > 1)


def _normal(array: ShardedArray, sizes: Sizes) -> ShardedArray:
    """A legal array without the axes of degree 1."""
    check(array, sizes)
    axes = tuple(_larger(axes, sizes) for axes in array.axes)
    return replace(array, axes=axes, unreduced=_larger(array.unreduced, sizes))


def _larger(axes: tuple[str, ...], sizes: Sizes) -> tuple[str, ...]:
    """The axes of a degree above 1."""
    return tuple(axis for axis in axes if sizes.degrees[axis] > 1)


def _follow(way: Implementation, stages: tuple[Stage, ...], sizes: Sizes) -> Implementation:
    """A way continued by the stages of a chain, as they are written."""
    current = way.result
    steps: list[Step] = list(way.steps)
    for stage in stages:
        if stage.kind is None or stage.kind == "all-gather":
            # What an all-gather over axes of several dims does is what resharding does: one collective a dim.
            steps.extend(reshard(current, stage.result, sizes))
        elif stage.axes:
            steps.append(communicate(stage.kind, stage.axes, current, stage.result, sizes))
        current = stage.result
    return Implementation(steps=tuple(steps), result=current)
