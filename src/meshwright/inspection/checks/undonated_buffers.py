"""Arguments that come back changed and are not donated, so that a step holds both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiler import read_shardings
from meshwright.hlo import Shape, Spec
from meshwright.inspection.context import Argument, ProgramContext
from meshwright.inspection.finding import Finding, FindingKind

_LEAST_BYTES = 1 << 20
"""What all of them together must hold on a device to be reported."""


@dataclass(frozen=True, kw_only=True)
class NotDonated(Finding):
    """Arguments of which a train step returns new values beside the old ones. name, shape: of the largest."""

    kind = FindingKind.NOT_DONATED

    name: str
    shape: Shape
    count: int
    trees: tuple[str, ...]


def undonated_buffers(context: ProgramContext) -> Iterator[Finding]:
    """Arguments of a train step whose path, shape and sharding equal those of a result that has a buffer of its own."""
    if context.program is None or not context.is_train_step:
        return
    aliased_results, aliased_arguments = context.aliases
    results = [
        (pair.name, str(replace(pair.array, layout="")), pair.actual)
        for number, pair in enumerate(
            pair for pair in read_shardings(context.program, context.mesh) if pair.role == "output"
        )
        if number not in aliased_results
    ]
    kept = []
    for number, argument in enumerate(context.arguments):
        same = next((one for one in results if _is_of(context, argument, *one)), None)
        if number not in aliased_arguments and same is not None:
            results.remove(same)
            kept.append(argument)
    size = sum(argument.instruction.shape.bytes for argument in kept)
    if size < _LEAST_BYTES:
        return
    largest = max(kept, key=lambda argument: argument.instruction.shape.bytes)
    yield NotDonated(
        name=largest.name,
        shape=largest.instruction.shape,
        count=len(kept),
        trees=tuple(dict.fromkeys(argument.tree for argument in kept)),
        bytes=size,
        seconds=0.0 if context.system else None,
        source=context.first_use(largest.instruction),
    )


def _is_of(context: ProgramContext, argument: Argument, name: str, shape: str, spec: Spec | None) -> bool:
    """Whether a result is the new value of an argument: it has the path within the tree, the shape and the sharding."""
    path = argument.name.removeprefix(argument.tree)
    return bool(path) and name.endswith(path) and spec == argument.spec and shape == str(context.whole_shape(argument))
