"""State whose dtype, sharding or weak type changes in a step, so that the second call recompiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.sliced_all_reduces import SlicedAllReduce
from meshwright.proof.inspection.checks.undonated_buffers import is_split_as_data
from meshwright.proof.inspection.checks.unexpected_collectives import UnexpectedCollective
from meshwright.proof.inspection.context import Argument, ProgramContext, Result
from meshwright.proof.inspection.finding import Finding, FindingKind, num_elements


@dataclass(frozen=True, kw_only=True)
class StateChanged(Finding):
    """An argument whose updated value has another dtype, sharding, layout or weak type.

    shape: the global shape. before, after: the changed property of the old and of the new value. elements_held:
    elements per device before the step.
    """

    kind = FindingKind.STATE_CHANGED
    merged_by = ("before", "after")
    is_merged_across_sources = True

    name: str
    shape: Shape
    before: str
    after: str
    elements_held: int

    def explains(self, other: Finding) -> bool:
        """Whether `other` is a collective that only moves the new value to its changed sharding."""
        if isinstance(other, SlicedAllReduce):
            return num_elements(other.array) == math.prod(self.shape.dims)
        if not isinstance(other, UnexpectedCollective) or not other.is_of_shardings:
            return False
        return other.line == self.line or num_elements(other.array) in (math.prod(self.shape.dims), self.elements_held)

    def _sentences(self) -> tuple[str, str]:
        is_sharding, is_layout = self.before.startswith("P("), self.before.startswith("layout")
        fix = f"cast the new value to what went in: new.astype(old.dtype), here {self.before}"
        if self.before.startswith("a weak"):
            fix = "give the first value a dtype where it is made: jnp.full(shape, x, jnp.float32)"
        if is_sharding:
            fix = (
                "say what comes back: jax.jit(…, out_shardings=…) with the shardings of the arguments, or"
                " jax.lax.with_sharding_constraint on the new value"
            )
        if is_layout:
            fix = "give what comes back the layout of what goes in: jax.jit(…, out_shardings=Format(layout, sharding))"
        return (
            f"{self.name} {self.shape} goes in with {self.before} and comes back updated with {self.after}: the second"
            " call of the step compiles again" + (", or moves it back first" if is_sharding or is_layout else ""),
            fix,
        )


def changed_states(context: ProgramContext) -> Iterator[Finding]:
    """Yield state whose new value has another dtype, weak type, sharding or layout than the old one."""
    for one in context.traced(StateChanged.id):
        weak, strong = f"a weak {one.dtype}, as a Python number has it", f"dtype {one.dtype}"
        before, after = (weak, strong) if one.figures["was_weak"] else (strong, weak)
        shape = Shape(one.dtype, one.dims)
        yield _finding(context, one.figures["name"], shape, before, after, one.source, held=shape.size)
    for argument, result, compiled in _updated(context):
        shape, held = context.whole_shape(argument), argument.instruction.shape.size
        source = context.result_place(result) or context.first_use(argument.instruction)
        if result.shape.dtype != shape.dtype:
            before, after = f"dtype {shape.dtype}", f"dtype {result.shape.dtype}"
            yield _finding(context, argument.name, shape, before, after, source, held=held)
        elif _is_resharded(argument, result):
            yield _finding(context, argument.name, shape, f"{argument.spec}", f"{result.spec}", source, held=held)
        elif (before := _order(argument.instruction.shape)) != (after := _order(compiled)):
            before, after = f"layout {{{before}}} (minor to major)", f"layout {{{after}}}"
            yield _finding(context, argument.name, shape, before, after, source, held=held)


def _updated(context: ProgramContext) -> Iterator[tuple[Argument, Result, Shape]]:
    """Yield (argument, the result that is its new value, the result's compiled shape) for each updated argument."""
    taken: set[int] = set()
    compiled = list(context.module.root(context.module.entry).shape.arrays())
    for number, argument in enumerate(context.arguments):
        dims, path = context.whole_shape(argument).dims, argument.name.removeprefix(argument.tree)
        if context.state is not None and argument.tree not in context.state:
            continue
        # Outside of training, data may be a residual stream that a layer adds to; state is what is written in place.
        is_data = not context.is_train_step and not path and is_split_as_data(context, argument)
        for place, result in enumerate(context.results):
            if place in taken or result.shape.dims != dims or (path and not result.name.endswith(path)):
                continue
            share = context.updates(result).get(number)
            if share is not None and share.is_changed and (share.is_written or not is_data):
                taken.add(place)
                yield argument, result, compiled[place]
                break


def _order(shape: Shape) -> str:
    """Return the order of an array's dims in memory, minor to major, as text; dims of size 1 are left out."""
    return ",".join(str(dim) for dim in shape.minor_to_major if shape.dims[dim] > 1)


def _is_resharded(argument: Argument, result: Result) -> bool:
    if argument.spec is None or result.spec is None:
        return False
    before, after = (tuple(dim or () for dim in spec.dims) for spec in (argument.spec, result.spec))
    return before != after


def _finding(
    context: ProgramContext, name: str, shape: Shape, before: str, after: str, source: str, *, held: int
) -> StateChanged:
    return StateChanged(
        name=name,
        shape=shape,
        before=before,
        after=after,
        elements_held=held,
        bytes=shape.bytes,
        cost_seconds=context.no_seconds,
        source=source,
    )
