"""Arguments that are whole on devices that should share them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshwright.hlo import Spec
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Argument, Subject
from meshwright.units import show_bytes

SHARE_OF_TREE = 0.01
"""How much of its tree an argument is that is worth a word where no rule asks for it."""

MOST_SHARD = 0.5
"""Where so much of a tree is split, a part that is whole everywhere is taken for forgotten."""


def replicated_parameters(subject: Subject) -> Iterator[Finding]:
    """Arguments that a rule splits and the program does not; without rules, those unlike the rest of their tree."""
    if subject.rules:
        yield from _against_rules(subject)
        return
    trees: dict[str, list[Argument]] = {}
    for argument in subject.arguments:
        if argument.spec is not None and argument.instruction.shape.dtype[:1] in ("f", "b"):
            trees.setdefault(argument.tree, []).append(argument)
    for name, tree in trees.items():
        yield from _unlike_the_rest(subject, name, tree)


def _against_rules(subject: Subject) -> Iterator[Finding]:
    """Each argument that misses an axis that its rule splits it over."""
    for argument in subject.arguments:
        rule = next((rule for pattern, rule in subject.rules.items() if re.search(pattern, argument.name)), None)
        if rule is None or argument.spec is None:
            continue
        wanted = {axis for dim in rule for axis in _axes(dim)}
        missing = tuple(a for a, n in subject.mesh.items() if n > 1 and a in wanted and a not in _split(argument.spec))
        if missing:
            yield _finding(subject, argument, missing, f"its rule splits it over {'*'.join(missing)}")


def _unlike_the_rest(subject: Subject, name: str, tree: list[Argument]) -> Iterator[Finding]:
    """The large arguments of one tree that are whole everywhere while most of it is split over an axis of the batch.

    Over such an axis all that is stored can be split (FSDP); over others a whole copy may be meant.
    """
    sizes = [_global_bytes(subject, argument) for argument in tree]
    whole = sum(sizes)
    for axis, degree in subject.mesh.items():
        split = sum(size for one, size in zip(tree, sizes, strict=True) if one.spec and axis in _split(one.spec))
        if axis not in subject.batch_axes or degree < 2 or split < MOST_SHARD * whole:
            continue
        for argument, size in zip(tree, sizes, strict=True):
            dims = argument.instruction.shape.dims
            fits = len(dims) > 1 and any(dim % degree == 0 for dim in dims)
            if argument.spec and not _split(argument.spec) and fits and size >= SHARE_OF_TREE * whole:
                yield _finding(subject, argument, (axis,), f"{split / whole:.0%} of {name} is split over {axis}")
        return


def _finding(subject: Subject, argument: Argument, axes: tuple[str, ...], reason: str) -> Finding:
    """What it costs that one argument is not split over some axes."""
    shape, degree = argument.instruction.shape, subject.degree(axes)
    wasted = shape.bytes - shape.bytes // degree
    over = "*".join(axes)
    return Finding(
        kind="replicated parameter",
        evidence=f"{argument.name} {shape} has a copy on each of {degree} devices along {over}; {reason}:"
        f" {show_bytes(wasted)} a device held for nothing",
        bytes=wasted,
        seconds=0.0 if subject.system else None,
        source=subject.first_use(argument.instruction),
        fix=f"put it where it belongs before the step: a NamedSharding with {over} for {argument.name}, given to"
        " device_put, to jit's in_shardings, or to the function that makes it",
    )


def _global_bytes(subject: Subject, argument: Argument) -> int:
    """The bytes of all of an argument's shards together."""
    return argument.instruction.shape.bytes * subject.degree(_split(argument.spec) if argument.spec else ())


def _split(spec: Spec) -> tuple[str, ...]:
    """The axes that split any dim."""
    return tuple(axis for dim in spec.dims for axis in dim or ())


def _axes(dim: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes of one entry of a spec."""
    return () if dim is None else (dim,) if isinstance(dim, str) else tuple(dim)
