"""The dims of a program's arrays, and which dims are equal.

A dim is a tuple of atoms: integers that stand for its factors, major to minor. A new dim has one atom, which is split
when only a part of the dim equals another dim: when [3072] is reshaped to [16, 3, 64], the atom of size 3072 becomes
three. A union-find structure records which atoms are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Dim = tuple[int, ...]
"""The atoms of a dim, major to minor, by their numbers in `Dims`; none for a dim of size 1."""


class Dims:
    """All atoms of a program. `unite` records that dims are equal, `bar` that no mesh axis may split a dim."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parents: list[int] = []
        self._parts: dict[int, Dim] = {}
        self.barred: dict[int, str] = {}
        """{atom: why no mesh axis may split it}. The atom may since have been united or split."""

    def new(self, size: int) -> Dim:
        """Return a new dim with one atom, or without atoms if its size is 1."""
        if size == 1:
            return ()
        self._sizes.append(size)
        self._parents.append(len(self._parents))
        return (len(self._parents) - 1,)

    def size(self, dim: Dim) -> int:
        """Return the number of elements along a dim."""
        return math.prod(self._sizes[atom] for atom in dim)

    def atoms(self, dim: Dim) -> Dim:
        """Return the current atoms of a dim: each united set is one atom, each split atom is replaced by its parts."""
        found: list[int] = []
        for atom in dim:
            root = self._root(atom)
            parts = self._parts.get(root)
            found.extend((root,) if parts is None else self.atoms(parts))
        return tuple(found)

    def unite(self, first: Dim, second: Dim) -> bool:
        """Record that two dims are equal, atom by atom from the major end.

        Returns False if their sizes do not divide each other; atoms before that point are united all the same.
        """
        one, other = list(self.atoms(first)), list(self.atoms(second))
        while one and other:
            a, b = one[0], other[0]
            if self._sizes[a] == self._sizes[b]:
                if a != b:
                    self._parents[b] = a
                one, other = one[1:], other[1:]
                continue
            large, small = (a, b) if self._sizes[a] > self._sizes[b] else (b, a)
            if self._sizes[large] % self._sizes[small]:
                return False
            self._parts[large] = (*self.new(self._sizes[small]), *self.new(self._sizes[large] // self._sizes[small]))
            one, other = list(self.atoms(tuple(one))), list(self.atoms(tuple(other)))
        return not one and not other

    def unite_all(self, dims: Iterable[Dim]) -> None:
        """Record that all of these dims are equal."""
        first, *others = dims
        for other in others:
            self.unite(first, other)

    def bar(self, dim: Dim, reason: str) -> None:
        """Record why no mesh axis may split the atoms of a dim."""
        for atom in self.atoms(dim):
            self.barred.setdefault(atom, reason)

    def why_barred(self) -> dict[int, str]:
        """Return {atom: why no mesh axis may split it}, the entries of `barred` at the current atoms (`atoms`)."""
        return {atom: reason for one, reason in self.barred.items() for atom in self.atoms((one,))}

    def _root(self, atom: int) -> int:
        while self._parents[atom] != atom:
            self._parents[atom] = self._parents[self._parents[atom]]
            atom = self._parents[atom]
        return atom
