"""Arguments that are replicated over axes that should shard them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.description.hlo.shapes import Shape
from meshwright.proof.inspection.checks.replicated_states import replicated_names
from meshwright.proof.inspection.context import Argument, ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.units import show_bytes

SHARE_OF_TREE = 0.01
"""Without rules: the smallest argument reported, as a fraction of its tree."""

MOST_SHARD = 0.5
"""If at least this fraction of a tree is sharded, a replicated part is assumed to be a mistake."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedParameter(Finding):
    """An argument that is replicated over axes that should shard it.

    tree: the argument's tree. sharded_share: the fraction of the tree's bytes that is sharded over `axes`. They are ''
    and None if a rule requests the sharding. others: arguments of the same path and shape in other trees, e.g. moments.
    """

    kind = FindingKind.REPLICATED_PARAMETER
    merged_by = ("name", "axes")

    name: str
    shape: Shape
    axes: tuple[str, ...]
    degree: int
    tree: str = ""
    sharded_share: float | None = None
    others: tuple[str, ...] = ()

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        more = f", as {' and '.join(self.others)}, has" if self.others else " has"
        why = f"its rule splits it over {over}"
        if self.sharded_share is not None:
            why = f"{self.sharded_share:.0%} of {self.tree} is split over {over}"
        return (
            f"{self.name} {self.shape}{more} a copy on each of {self.degree} devices along {over}; {why}:"
            f" {show_bytes(self.bytes)} a device held for nothing",
            f"put it where it belongs before the step: a NamedSharding with {over} for {self.name}, given to"
            " device_put, to jit's in_shardings, or to the function that makes it",
        )


def replicated_parameters(context: ProgramContext) -> Iterator[Finding]:
    """Yield arguments not sharded as their rule says; without rules, replicated ones of a mostly sharded tree."""
    if context.rules:
        for argument in context.arguments:
            rule = next((rule for pattern, rule in context.rules.items() if re.search(pattern, argument.name)), None)
            if rule is None or argument.spec is None:
                continue
            wanted = {axis for dim in rule for axis in ((dim,) if isinstance(dim, str) else dim or ())}
            missing = tuple(a for a, n in context.mesh.items() if n > 1 and a in wanted and a not in argument.spec.axes)
            if missing:
                yield _finding(context, argument, missing)
        return
    trees: dict[str, list[Argument]] = {}
    states = replicated_names(context)
    for argument in context.arguments:
        if (
            argument.name not in states
            and argument.spec is not None
            and argument.instruction.shape.dtype[:1] in ("f", "b")
        ):
            trees.setdefault(argument.tree, []).append(argument)
    found: dict[object, ReplicatedParameter] = {}
    for name, tree in trees.items():
        for one in _unlike_the_rest(context, name, tree):
            key = re.findall(r"[^\[.\]]+", one.name)[-1], str(one.shape), one.axes
            first = found.get(key)
            more = first and replace(first, others=(*first.others, one.name), bytes=first.bytes + one.bytes)
            found[key] = more or one
    yield from found.values()


def _unlike_the_rest(context: ProgramContext, name: str, tree: list[Argument]) -> Iterator[ReplicatedParameter]:
    """Yield large replicated arguments of a tree that is mostly sharded over an axis of the batch.

    Every parameter can be sharded over such an axis (FSDP). Over other axes replicas may be intended, also over axes
    with an all-to-all: these shard experts, which are most of a tree, and no other parameters.
    """
    exchanged = {
        axis for move in context.collectives if move.collective.kind == "all-to-all" for axis in move.collective.axes
    }
    # Of each argument, the bytes of all shards.
    sizes = [one.instruction.shape.bytes * context.degree(one.spec.axes if one.spec else ()) for one in tree]
    whole = sum(sizes)
    for axis, degree in context.mesh.items():
        split = sum(size for one, size in zip(tree, sizes, strict=True) if one.spec and axis in one.spec.axes)
        if axis not in context.batch_axes - exchanged or degree < 2 or split < MOST_SHARD * whole:
            continue
        for argument, size in zip(tree, sizes, strict=True):
            dims = argument.instruction.shape.dims
            fits = len(dims) > 1 and any(dim % degree == 0 for dim in dims)
            if argument.spec and not argument.spec.axes and fits and size >= SHARE_OF_TREE * whole:
                yield _finding(context, argument, (axis,), tree=name, sharded_share=split / whole)
        return


def _finding(
    context: ProgramContext,
    argument: Argument,
    axes: tuple[str, ...],
    *,
    tree: str = "",
    sharded_share: float | None = None,
) -> ReplicatedParameter:
    shape, degree = argument.instruction.shape, context.degree(axes)
    return ReplicatedParameter(
        name=argument.name,
        shape=shape,
        axes=axes,
        degree=degree,
        tree=tree,
        sharded_share=sharded_share,
        bytes=shape.bytes - shape.bytes // degree,
        cost_seconds=context.no_seconds,
        source=context.first_use(argument.instruction),
    )
