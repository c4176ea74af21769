"""Expressions of the notation: einsums and chains of collectives. `str` returns an expression's text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.description.notation.array import FUNCTION_NAMES, SHORT_NAMES, ShardedArray, subscript
from meshwright.description.notation.moves import after
from meshwright.errors import MeshwrightError
from meshwright.record import Kind

_FUNCTION = {kind: name for name, kind in FUNCTION_NAMES.items()}
_SHORT = {kind: name for name, kind in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Einsum:
    """An einsum of two or more arrays. Dims that the result does not have are summed.

    result: None if the text states none (`names.default_result`).
    """

    operands: tuple[ShardedArray, ...]
    result: ShardedArray | None = None

    def __post_init__(self) -> None:
        if len(self.operands) < 2:
            raise MeshwrightError(f"a matmul has two or more operands, this one {len(self.operands)}")
        for dim in self.result.dims if self.result else ():
            if all(dim not in operand.dims for operand in self.operands):
                raise MeshwrightError(f"the result has dim {dim}, which no operand has")

    def __str__(self) -> str:
        left = " @ ".join(map(str, self.operands))
        if self.result is None:
            return left
        return f"{left} {'->' if self.result.name else '='} {self.result}"


@dataclass(frozen=True)
class Stage:
    """One arrow of a `Chain`: a collective over some axes, and the array after it.

    kind: None if the arrow names no collective and any resharding will do; `axes` are then empty.
    """

    kind: Kind | None
    axes: tuple[str, ...]
    result: ShardedArray


@dataclass(frozen=True)
class Chain:
    """An array, or an einsum with its result, and the stages that are applied to it one after another.

    `AllGather_X(A[I_X, J]) -> A[I, J]` has one stage, a collective. `A[I_X, J] -> A[I, J_X]` has one stage, any
    resharding.
    """

    start: ShardedArray | Einsum
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages or self.first is None:
            raise MeshwrightError(
                "a chain goes from an array, or from a product with its result, through one stage or more"
            )
        before = self.first
        for stage in self.stages:
            check_stage(before, stage)
            before = stage.result

    @property
    def first(self) -> ShardedArray | None:
        """The array before the first stage."""
        return self.start.result if isinstance(self.start, Einsum) else self.start

    @property
    def result(self) -> ShardedArray:
        """The array after the last stage."""
        return self.stages[-1].result

    def __str__(self) -> str:
        stage = self.stages[0]
        if isinstance(self.start, ShardedArray) and self.start.name and stage.kind and len(self.stages) == 1:
            return f"{_call(self.start, stage)} -> {stage.result}"
        texts = [
            f"{_SHORT[s.kind]} over {subscript(s.axes)[1:]} -> {s.result}" if s.kind else str(s.result)
            for s in self.stages
        ]
        return " -> ".join([str(self.start), *texts])


Expression = ShardedArray | Einsum | Chain


def check_stage(before: ShardedArray, stage: Stage) -> None:
    """Raise if the collective or resharding of `stage`, applied to `before`, does not give `stage.result`."""
    if stage.kind is None:
        if before.dims != stage.result.dims:
            raise MeshwrightError(f"a resharding keeps the dims: {before} has {', '.join(before.dims)}")
        if not set(stage.result.unreduced) <= set(before.unreduced):
            raise MeshwrightError(f"a resharding cannot leave {stage.result} unreduced; {before} is not")
        return
    if stage.kind not in _FUNCTION or not stage.axes or len(set(stage.axes)) < len(stage.axes):
        axes = ", ".join(stage.axes) or "no axis"
        raise MeshwrightError(f"a {stage.kind} over {axes}; it is one of {', '.join(_FUNCTION)}, over each axis once")
    expected = after(before, stage.kind, stage.axes, stage.result)
    if not expected.has_sharding_of(stage.result):
        raise MeshwrightError(f"{_call(before, replace(stage, result=expected))} is {expected}, not {stage.result}")


def _call(operand: ShardedArray, stage: Stage) -> str:
    """Return the text of a collective as a function of its operand: `ReduceScatter_{X,K}(C[I, K]{U_X})`."""
    assert stage.kind is not None
    name, axes = _FUNCTION[stage.kind], ",".join(stage.axes)
    target = stage.result.dim_of(stage.axes[-1])
    if stage.kind == "reduce-scatter":
        return f"{name}_{{{axes},{target}}}({operand})"
    if stage.kind == "all-to-all":
        return f"{name}_{{{axes},{operand.dim_of(stage.axes[-1])}->{target}}}({operand})"
    return f"{name}{subscript(stage.axes)}({operand})"
