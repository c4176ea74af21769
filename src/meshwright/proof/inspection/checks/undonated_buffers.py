"""Updated state that is not donated, so that old and new values are in memory together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.context import Argument, ProgramContext, Result
from meshwright.proof.inspection.finding import Finding, FindingKind
from meshwright.units import show_bytes

_LEAST_BYTES = 1 << 17
"""The smallest total of such state reported, in bytes per device."""


@dataclass(frozen=True, kw_only=True)
class NotDonated(Finding):
    """State whose new values a step returns in new buffers.

    count: number of arrays. trees: the function arguments that have them.
    """

    kind = FindingKind.NOT_DONATED

    name: str  # Path of the largest array; `shape` is its shape.
    shape: Shape
    count: int
    trees: tuple[str, ...]

    def _sentences(self) -> tuple[str, str]:
        trees = " and ".join(self.trees)
        many = f"{self.count} arrays of {trees}, the largest {self.name} {self.shape}, come back updated and keep their"
        one = f"{self.name} {self.shape} comes back updated and keeps its"
        numbers = [tree[5:-1] for tree in self.trees if tree.startswith("args[")]
        names = [repr(tree) for tree in self.trees if not tree.startswith("args[")]
        donated = [f"donate_argnums=[{', '.join(numbers)}]"] * bool(numbers)
        donated += [f"donate_argnames=[{', '.join(names)}]"] * bool(names)
        jitted = f"jax.jit(…, {', '.join(donated)})"
        if any(tree.startswith("dynamic_") for tree in self.trees):
            jitted = "eqx.filter_jit(…, donate='all')"  # it has its own names for jitted functions
        return (
            f"{many if self.count > 1 else one} old buffers: {show_bytes(self.bytes)} a device for values that a loop"
            " of such steps needs no more",
            f"{jitted}, and do not use what was handed over after the call",
        )


def undonated_buffers(context: ProgramContext) -> Iterator[Finding]:
    """Yield arguments of a step whose update is a result of equal shape and sharding in another buffer.

    Updates are recognized by what computes them (`hlo.updates.Updates`), or the caller names them as state. In steps
    other than train steps, only arguments count that are written at an index known only at run time, such as caches.
    """
    if context.program is None:
        return
    # A result may be in a donated buffer of equal shape that had another value, so that its own old value is kept.
    borrowed = {
        number
        for number, result in enumerate(context.results)
        if (donated := context.aliases.get(number)) is not None
        if not _is_update(context, donated, context.arguments[donated], result)
    }
    if borrowed and any(_comes_back_in_another_dtype(context, argument) for argument in context.arguments):
        borrowed = set[int]()  # Such state leaves its buffers to others, and is a finding of its own.
    free = [
        result for number, result in enumerate(context.results) if number in borrowed or number not in context.aliases
    ]
    kept, donated = [], {*context.aliases.values()}
    for number, argument in enumerate(context.arguments):
        if number in donated:
            continue
        same = [one for one in free if one.spec == argument.spec and one.shape == context.whole_shape(argument)]
        new = next((result for result in same if _is_update(context, number, argument, result)), None)
        if new is not None:
            free.remove(new)
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
        cost_seconds=context.no_seconds,
        source=context.first_use(largest.instruction),
    )


def _is_update(context: ProgramContext, number: int, argument: Argument, result: Result) -> bool:
    """Whether a result is the new value of an argument."""
    shares = context.updates(result)
    if not context.is_train_step:
        return number in shares and shares[number].is_written
    if context.state is not None:
        return argument.tree in context.state and (number in shares or _has_path_of(argument, result))
    share = shares.get(number)
    if share is None:
        # Parameters in low precision are rounded from those that the optimizer keeps.
        of_others = any(one.is_changed and one.factor == 1.0 for one in shares.values())
        return of_others and _has_path_of(argument, result)
    if argument.name == argument.tree and number in context.differentiated and is_split_as_data(context, argument):
        return False  # an adversarial example, say, whose batch the caller still has a use for
    return share.is_changed or argument.tree in context.trained_trees


def _has_path_of(argument: Argument, result: Result) -> bool:
    """Whether a result has the path of an argument within its tree."""
    path = argument.name.removeprefix(argument.tree)
    return bool(path) and result.name.endswith(path)


def _comes_back_in_another_dtype(context: ProgramContext, argument: Argument) -> bool:
    """Whether a result has the path and dims of an argument, and another dtype."""
    whole = context.whole_shape(argument)
    return any(
        _has_path_of(argument, result) and result.shape.dims == whole.dims and result.shape.dtype != whole.dtype
        for result in context.results
    )


def is_split_as_data(context: ProgramContext, argument: Argument) -> bool:
    """Whether the first dim of an argument is split as batches are, and no all-gather gathers it like a parameter."""
    split = argument.spec.dims[0] if argument.spec and argument.spec.dims else ()
    return bool(context.batch_axes.intersection(split or ())) and argument.instruction.name not in context.gathered
