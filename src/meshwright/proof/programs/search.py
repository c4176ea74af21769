"""Search the layouts of a program: each mesh axis splits a set of classes, no two of which occur in one array.

A class is a set of equal dims, identified by an atom (`dims`). Two dims of one array cannot share a mesh axis. The
largest sets without such a pair are the known strategies: the batch (data parallel), the heads, the MLP and the
vocabulary together (tensor parallel), the sequence. An axis splits by part if it splits such a set where it occurs, and
the batch or the sequence elsewhere: large dense layers after convolutions, experts between attention, or the norms
between tensor parallel layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

from meshwright.errors import MeshwrightError
from meshwright.mesh import divisors
from meshwright.proof.programs.classes import DimClass
from meshwright.proof.programs.flat import Atoms
from meshwright.proof.programs.layout import Axis, Layout, Sizes
from meshwright.proof.programs.price import Priced
from meshwright.proof.programs.work import Work
from meshwright.record import Record

MOST_ENUMERATED = 200
"""The most maximal sets of classes that are enumerated, each without two classes that occur in one array."""

MOST_SETS = 24
"""The most sets that a search tries on one axis; sets that split more flops come first."""

MOST_PAIRED = 6
"""The number of leading sets that are also tried in pairs, on two axes."""


MOST_STARTS = 6
"""The most layouts that are varied: an axis that splits by part gains or loses a class at a time, while that helps."""


@dataclass(frozen=True)
class Found:
    """A layout and its predicted record. is_varied: it is another layout with a class added to an axis or removed."""

    layout: Layout
    record: Record
    is_varied: bool = False


def find_layouts(priced: Priced, classes: tuple[DimClass, ...], degrees: Mapping[str, int] | None) -> list[Found]:
    """Return all layouts on a system: first those that fit, fastest first; then the others, least memory first.

    Args:
        priced: the program on the system.
        classes: its classes of dims.
        degrees: the degree of each mesh axis, outermost first; None for every mesh of all devices.

    Raises:
        MeshwrightError: no class can be split so that every device has work.
    """
    splittable = [one for one in classes if not one.barred]
    batch, sets = data_set(priced, splittable), model_sets(priced, splittable)

    def ordered(atoms: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(atoms, key=lambda atom: (atom in batch, atom not in priced.weights, atom)))

    by_part = [ordered(one) for one in sets_by_part(priced, batch, sets)]
    sizes, data, others = Sizes(priced.program), ordered(batch), [ordered(one) for one in sets]
    if degrees is None:
        made = _layouts(priced, data, others, by_part, sizes)
    else:
        made = _on_mesh(degrees, data, others, by_part)
    found: dict[tuple[Axis, ...], Found] = {}

    def add(axes: tuple[Axis, ...], *, is_varied: bool = False) -> Found | None:
        axes = tuple(axis for axis in (_cut(axis, axes, sizes) for axis in axes) if axis.degree > 1 or degrees)
        if any(axis.degree > 1 and not axis.atoms for axis in axes):
            return None
        if axes not in found:
            layout = Layout(axes, sizes, priced.barred)
            found[axes] = Found(layout, priced.record(layout), is_varied)
        return found[axes]

    for axes in made:
        add(axes)
    flops = _flops_by_atom(priced)
    own = [one.atom for one in splittable if one.atom in priced.weights - batch and flops.get(one.atom)]
    for start in _starts(found.values(), own):
        best = start
        while better := [
            other
            for axes in _with_another_class(best.layout.axes, own, ordered)
            if (other := add(axes, is_varied=True)) and _is_better(other, best)
        ]:
            best = min(better, key=_order)
    if not found:
        sizes_of = ", ".join(f"{one.name} {one.size}" for one in splittable)
        raise MeshwrightError(
            f"no class of dims can be split over {priced.system.num_devices} devices; the classes have the sizes"
            f" {sizes_of or 'of nothing'}"
        )
    return sorted(found.values(), key=_order)


def _order(found: Found) -> tuple[bool, float, int, str]:
    record, axes = found.record, found.layout.axes
    wanted = record.step_seconds if record.fits else record.memory_bytes["peak"]
    return not record.fits, round(wanted or 0.0, 9), len(axes), str(record.mesh)


def _is_better(found: Found, other: Found) -> bool:
    """Whether a layout fits where another does not, or is faster by over 1%."""
    one, two = found.record, other.record
    if one.fits != two.fits:
        return bool(one.fits)
    return (one.step_seconds or 0.0) < 0.99 * (two.step_seconds or 0.0)


def _is_by_part(axis: Axis, own: Iterable[int]) -> bool:
    """Whether an axis splits by part: some of its classes are in `own`, the classes of weights, and some are not."""
    return 0 < len(set(axis.atoms) - set(own)) < len(axis.atoms)


def _starts(found: Iterable[Found], own: Iterable[int]) -> list[Found]:
    """Return the best layout for each (degree, `is_stored`) of an axis that splits by part, at most `MOST_STARTS`.

    own: the atoms of the classes of weights.
    """
    best: dict[tuple[int, bool], Found] = {}
    for one in sorted(found, key=_order):
        for axis in one.layout.axes:
            if _is_by_part(axis, own):
                best.setdefault((axis.degree, axis.is_stored), one)
    return list(best.values())[:MOST_STARTS]


def _with_another_class(
    axes: tuple[Axis, ...], own: Iterable[int], ordered: Callable[[Iterable[int]], tuple[int, ...]]
) -> Iterator[tuple[Axis, ...]]:
    """Yield the axes of a mesh with one class of weights more or less on an axis that splits by part.

    own: the atoms of the classes of weights. ordered: sorts an axis's atoms; an array is split along the first it has.
    """
    for place, axis in enumerate(axes):
        for atom in own if _is_by_part(axis, own) else ():
            atoms = set(axis.atoms) ^ {atom}
            if not atoms.isdisjoint(own):
                yield (*axes[:place], replace(axis, atoms=ordered(atoms)), *axes[place + 1 :])


def _cut(axis: Axis, axes: tuple[Axis, ...], sizes: Mapping[int, int]) -> Axis:
    """Return an axis without the classes whose size is not a multiple of the degrees of all axes that split them."""

    def degree(atom: int) -> int:
        return math.prod(other.degree for other in axes if atom in other.atoms)

    return Axis(axis.name, axis.degree, tuple(a for a in axis.atoms if sizes[a] % degree(a) == 0), axis.is_stored)


def _layouts(
    priced: Priced,
    batch: tuple[int, ...],
    sets: list[tuple[int, ...]],
    by_part: list[tuple[int, ...]],
    sizes: Mapping[int, int],
) -> Iterator[tuple[Axis, ...]]:
    """Yield the axes of every mesh of a system: dp and fsdp over the batch, and up to two axes over other classes.

    Axes over other classes are named tp if they split dims of weights, and sp if not. batch: the atoms of the
    batch. sets: from `model_sets`. by_part: from `sets_by_part`. sizes: the size of each atom.
    """

    def name(atoms: tuple[int, ...]) -> str:
        return "sp" if priced.weights.isdisjoint(atoms) else "tp"

    count = priced.system.num_devices
    for data in divisors(count) if batch else [1]:
        if any(sizes[atom] % data for atom in priced.batch):
            continue
        for stored in divisors(data):
            first = (Axis("dp", data // stored, batch), Axis("fsdp", stored, batch, True))
            rest = count // data
            if rest == 1:
                yield first
                continue
            for chosen, is_stored in product((*sets, *by_part), (False, True)):
                # Without another axis to store over, the state can be split over this one. An axis that splits the
                # batch too stores as the others do: the partitioner gathers what is summed over both otherwise.
                if stored == 1 or chosen in (by_part if is_stored else sets):
                    yield (*first, Axis(name(chosen), rest, chosen, is_stored))
            for one, other in combinations(sets[:MOST_PAIRED], 2):
                outer = name(one) + ("2" if name(one) == name(other) else "")
                for degree in divisors(rest):
                    if 1 < degree < rest:
                        yield (*first, Axis(outer, degree, one), Axis(name(other), rest // degree, other))


def _on_mesh(
    degrees: Mapping[str, int], batch: tuple[int, ...], sets: list[tuple[int, ...]], by_part: list[tuple[int, ...]]
) -> Iterator[tuple[Axis, ...]]:
    """Yield the axes of a mesh (`degrees`) for each choice of what each axis splits.

    It is the batch or a set of `by_part`, each with or without the state, or a set of `sets`. by_part: from
    `sets_by_part`. sets: from `model_sets`.
    """
    choices = [(atoms, is_stored) for atoms in (batch, *by_part) for is_stored in (False, True) if atoms]
    choices += [(one, False) for one in sets]
    nothing: list[tuple[tuple[int, ...], bool]] = [((), False)]
    for chosen in product(*(choices if degree > 1 else nothing for degree in degrees.values())):
        if len({is_stored for atoms, is_stored in chosen if atoms in by_part or is_stored}) < 2:
            yield tuple(Axis(name, degrees[name], *each) for name, each in zip(degrees, chosen, strict=True))


def sets_by_part(priced: Priced, batch: frozenset[int], sets: list[frozenset[int]]) -> list[frozenset[int]]:
    """Return sets of atoms for an axis that splits weights in a part of a program, and the batch or tokens elsewhere.

    Arrays with weights' dims in the set are split along these dims. All others are split along the batch, or along the
    dim of tokens that is in most flops, over which partial sums are then scattered.
    """
    tokens = [one for one in sets if not one & priced.weights][:1]
    with_weights = [one for one in sets[:MOST_PAIRED] if one & priced.weights]
    return [one | rest for one in with_weights for rest in (batch, *tokens) if rest - one]


def data_set(priced: Priced, classes: list[DimClass]) -> frozenset[int]:
    """Return the atoms of the batch, and of the dims that take its place elsewhere in the program.

    Such dims are in no weight and in no array with the batch, e.g. two concatenated batches, or minibatches sampled
    from it.
    """
    if not priced.batch:
        return priced.batch
    meets, flops = _meetings(priced.work, {value.dims for value in priced.state}), _flops_by_atom(priced)
    found = set(priced.batch)
    others = (one.atom for one in classes if not one.members and flops.get(one.atom))
    for atom in sorted(others, key=lambda atom: (-flops[atom], atom)):
        if not meets.get(atom, set()) & found:
            found.add(atom)
    return frozenset(found)


def model_sets(priced: Priced, classes: list[DimClass]) -> list[frozenset[int]]:
    """Return the sets of classes that an axis can split, without the batch, as atoms: maximal sets and single classes.

    No two classes of a set occur in one array. Sets that split more flops come first.
    """
    batch = data_set(priced, classes)
    meets = _meetings(priced.work, {value.dims for value in priced.state})
    ours = [one.atom for one in classes if one.atom not in batch]
    largest = list(islice(_maximal(frozenset(ours), meets), MOST_ENUMERATED))
    singles = [frozenset((atom,)) for atom in ours]
    flops, weights = _flops_by_atom(priced), priced.weights
    # Classes without flops: a lookup table is grouped with weights, and indices with nothing.
    largest = [frozenset(atom for atom in one if atom in weights or flops.get(atom)) for one in largest]
    largest = [one if any(flops.get(atom) for atom in one & weights) else one - weights for one in largest]
    found = dict.fromkeys([*largest, *singles])
    ranked = sorted(found, key=lambda one: (-sum(flops.get(atom, 0.0) for atom in one), sorted(one)))
    return [one for one in ranked if any(flops.get(atom) for atom in one)][:MOST_SETS]


def axes_by_part(work: Work, layout: Layout) -> list[Axis]:
    """Return the axes with two classes that occur in one array of a matmul, of which the axis splits only the first."""
    meets = _meetings(work, set())
    return [
        axis for axis in layout.axes if any(not meets.get(atom, set()).isdisjoint(axis.atoms) for atom in axis.atoms)
    ]


def _flops_by_atom(priced: Priced) -> dict[int, float]:
    """Return {first atom of a dim: the flops per step of all matmuls with an operand that has this dim}."""
    found: dict[int, float] = {}
    sizes = Sizes(priced.program)
    for one, times in priced.work.products.items():
        dims = {dim for value in (one.left, one.right) for dim in value.dims if dim}
        flops = times * one.window * math.prod(float(sizes[atom]) for dim in dims for atom in dim)
        for dim in dims:
            found[dim[0]] = found.get(dim[0], 0.0) + flops
    return found


def _meetings(work: Work, state: set[Atoms]) -> dict[int, set[int]]:
    """Return {atom: the other atoms that occur in an array with it}, for the first atom of each dim.

    The arrays are the operands and results of matmuls, and the state's leaves, whose dims are `state`.
    """
    found: dict[int, set[int]] = {}
    arrays = {value.dims for one in work.products for value in (one.left, one.right, one.result)}
    for dims in arrays | state:
        firsts = {dim[0] for dim in dims if dim}
        for atom in firsts:
            found.setdefault(atom, set()).update(firsts - {atom})
    return found


def _maximal(atoms: frozenset[int], meets: Mapping[int, set[int]]) -> Iterator[frozenset[int]]:
    """Yield the maximal subsets of `atoms` in which no two atoms occur in one array (Bron and Kerbosch, 1973).

    meets: from `_meetings`.
    """

    def extend(chosen: frozenset[int], left: frozenset[int], done: frozenset[int]) -> Iterator[frozenset[int]]:
        if not left and not done:
            yield chosen
        # Only this atom, or atoms that occur in an array with it, can lead to another set.
        pivot = max(left | done, key=lambda atom: (len(left - meets.get(atom, set())), -atom), default=None)
        for atom in sorted(one for one in left if one == pivot or one in meets.get(pivot or -1, ())):
            apart = frozenset(other for other in atoms if other != atom and other not in meets.get(atom, ()))
            yield from extend(chosen | {atom}, left & apart, done & apart)
            left, done = left - {atom}, done | {atom}

    if atoms:
        yield from extend(frozenset(), atoms, frozenset())
