"""A layout of a program: which classes of equal dims each mesh axis splits, and which axes split the state at rest.

A class is identified by an atom (`dims`). The state at rest is the state between steps.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from meshwright.proof.programs.flat import Atoms, Value
from meshwright.proof.programs.trace import Program


@dataclass(frozen=True)
class Axis:
    """A mesh axis: its degree, the atoms of the classes that it splits, and whether it splits the state between steps.

    An array with dims of several of these classes is split along the first class. So parts of a program can be split
    differently: with an MLP's hidden dim before the batch, the MLP is tensor parallel, and all else data parallel.
    """

    name: str
    degree: int
    atoms: tuple[int, ...] = ()
    is_stored: bool = False


class Sizes(dict[int, int]):
    """The size of each atom of a program, looked up at its first use."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __missing__(self, atom: int) -> int:
        self[atom] = self.program.dims.size((atom,))
        return self[atom]


def dims_at_rest(program: Program, barred: Container[int]) -> dict[tuple[int, ...], Atoms]:
    """Return {`of_any_order(dims)`: dims} for the state's leaves, and for their slices in a loop over layers.

    An array whose atoms are a key is a leaf, a copy of one, or its gradient, perhaps transposed or reshaped. barred:
    atoms that no axis may split, such as the dim of layers.
    """
    whole = {tuple(program.dims.atoms(dim) for dim in program.arguments[number][1]) for number in program.state}
    whole |= {dims[1:] for dims in whole if dims and dims[0] and dims[0][0] in barred}
    return {of_any_order(dims): dims for dims in sorted(whole)}


def of_any_order(dims: Atoms) -> tuple[int, ...]:
    """Return the atoms of dims in an order that transposes and reshapes do not change."""
    return tuple(sorted(atom for dim in dims for atom in dim))


@dataclass(frozen=True)
class Layout:
    """The mesh axes, outermost first, each with the classes of dims that it splits (`Axis`).

    sizes: the size of each atom. barred: atoms that no axis may split.
    """

    axes: tuple[Axis, ...]
    sizes: Mapping[int, int] = field(hash=False, compare=False)
    barred: frozenset[int] = frozenset()
    _splits: dict[Atoms, tuple[tuple[str, ...], ...]] = field(default_factory=dict, hash=False, compare=False)
    _elements: dict[Atoms, float] = field(default_factory=dict, hash=False, compare=False)
    _stored: dict[Atoms, tuple[int, tuple[str, ...]] | None] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis, outermost first."""
        return {axis.name: axis.degree for axis in self.axes}

    @cached_property
    def table(self) -> dict[int, tuple[str, ...]]:
        """The axes that split each class, by its atom. Classes of one axis are in the axis's order (`Axis.atoms`)."""
        order = TopologicalSorter[int]()
        for axis in self.axes:
            for place, atom in enumerate(axis.atoms):
                order.add(atom, *axis.atoms[:place])
        return {atom: tuple(axis.name for axis in self.axes if atom in axis.atoms) for atom in order.static_order()}

    @cached_property
    def store(self) -> tuple[str, ...]:
        """The axes that split the state at rest."""
        return tuple(axis.name for axis in self.axes if axis.is_stored)

    def degree(self, axes: Iterable[str]) -> int:
        """Return the product of the degrees of some axes."""
        return math.prod(self.degrees[axis] for axis in axes)

    def split(self, dims: Atoms) -> tuple[tuple[str, ...], ...]:
        """Return the axes that split each dim of an array. Each axis splits at most one dim, by its first atom."""
        if (known := self._splits.get(dims)) is not None:
            return known
        found: list[tuple[str, ...]] = [()] * len(dims)
        for axis in self.axes:
            places = [place for place, dim in enumerate(dims) if dim and dim[0] in axis.atoms]
            if places:
                first = min(places, key=lambda place: axis.atoms.index(dims[place][0]))
                found[first] = (*found[first], axis.name)
        self._splits[dims] = tuple(found)
        return self._splits[dims]

    def whole(self, dims: Atoms) -> int:
        """Return the global number of elements of an array."""
        return math.prod(self.sizes[atom] for dim in dims for atom in dim)

    def elements(self, dims: Atoms) -> float:
        """Return the number of elements of an array's shard."""
        if (known := self._elements.get(dims)) is None:
            known = self._elements[dims] = self.whole(dims) / self.degree(
                axis for axes in self.split(dims) for axis in axes
            )
        return known

    def size(self, value: Value) -> float:
        """Return the bytes of an array on a device."""
        return value.width * self.elements(value.dims)

    def is_open(self, dim: tuple[int, ...]) -> bool:
        """Whether the table cannot split a dim because only a minor part of it is in a class that is split."""
        return not self.table.get(dim[0] if dim else -1) and any(self.table.get(atom) for atom in dim[1:])

    def stored_over(self, dims: Atoms) -> tuple[str, ...]:
        """Return the axes of `store` that split a state leaf at rest; () if they divide none of its dims."""
        found = self.stored(dims)
        return found[1] if found else ()

    def stored(self, dims: Atoms) -> tuple[int, tuple[str, ...]] | None:
        """Return the index and axes of the dim of a state leaf that `store` splits (the largest unsplit one)."""
        if self.store and dims not in self._stored:
            self._stored[dims] = self._free(dims)
        return self._stored.get(dims)

    def _free(self, dims: Atoms) -> tuple[int, tuple[str, ...]] | None:
        splits = self.split(dims)
        used = {axis for axes in splits for axis in axes}
        axes = tuple(axis for axis in self.store if axis not in used)
        degree = self.degree(axes)
        sizes = {
            place: self.whole((dim,))
            for place, dim in enumerate(dims)
            if axes and dim and not splits[place] and dim[0] not in self.barred
        }
        free = [place for place, size in sizes.items() if size % degree == 0]
        if not free:
            return None
        # Among dims of equal size, choose independently of their order, so that a gradient is sharded like its leaf.
        return max(free, key=lambda place: (sizes[place], -dims[place][0], -place)), axes
