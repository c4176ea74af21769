"""Classes of equal dims, with names: the keys of the table that `apply` takes.

An atom (`dims`) is an integer that stands for a dim, or for a factor of a reshaped dim; equal dims have
equal atoms.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshwright.errors import MeshwrightError
from meshwright.proof.programs.rules import MATMULS
from meshwright.proof.programs.trace import Body, Program

GENERIC = {"kernel", "weight", "value", "w", "b", "bias", "scale", "raw_value"}
"""Parameter names that need their module's name in front, such as `kernel`."""


@dataclass(frozen=True)
class DimClass:
    """Dims of a program that are equal, so that a mesh axis splits all of them or none.

    atom: the number that its dims share, which identifies the class. members: dims of arguments, as
    `params.kernel:1`, or a part of a reshaped dim, as `params.qkv:1.2`. barred: why no axis may split the class; '' if
    one may.
    """

    name: str
    size: int
    atom: int
    members: tuple[str, ...]
    barred: str = ""

    def __str__(self) -> str:
        why = f"; not split: {self.barred}" if self.barred else ""
        return f"{self.name} ({self.size}): {self.first_members}{why}"

    @property
    def first_members(self) -> str:
        """The first three members as text, and how many more there are."""
        more = f" and {len(self.members) - 3} more" if len(self.members) > 3 else ""
        return ", ".join(self.members[:3]) + more or "values only"


def tie_layers(program: Program) -> None:
    """Unite classes whose argument paths differ only in numbers: unrolled layers, `layers_0` and `layers_1`."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for atom, members in _members(program).items():
        shown = frozenset(re.sub(r"\d+", "#", path) + place for path, place in members)
        alike[(program.dims.size((atom,)), shown)].append(atom)
    for atoms in alike.values():
        program.dims.unite_all((atom,) for atom in atoms)


def classes_of(program: Program) -> tuple[DimClass, ...]:
    """Return the classes of a program's dims: first those of data, then of state, then of intermediate values.

    Classes of repeated layers are united. Of intermediate values, only the dims of matmul and convolution results have
    classes, e.g. the sequence of a step that first drops the last token.
    """
    tie_layers(program)
    barred = program.dims.why_barred()
    trained = {program.arguments[number][0] for number in program.state}
    vectors = {path for path, shape in program.arguments if len(shape) < 2}
    batch = batch_atoms(program)
    found: list[DimClass] = []
    taken: set[str] = set()
    for atom, members in sorted(
        _members(program).items(), key=lambda item: any(path in trained for path, _ in item[1])
    ):
        size = program.dims.size((atom,))
        names = _names(members, vectors, is_batch=atom in batch[:1])
        name = next(one for one in names if one not in taken)
        taken.add(name)
        found.append(DimClass(name, size, atom, tuple(path + place for path, place in members), barred.get(atom, "")))
    known = {one.atom for one in found}
    for atom in dict.fromkeys(_of_matmuls(program, program.body)):
        if atom not in known:
            name = f"dim of {(size := program.dims.size((atom,)))}"
            count = sum(one.name.startswith(name) for one in found)
            found.append(DimClass(f"{name} ({count + 1})" if count else name, size, atom, (), barred.get(atom, "")))
    return tuple(found)


def _of_matmuls(program: Program, body: Body) -> Iterator[int]:
    """Yield the atoms in the dims of all results of matmuls and convolutions, also in called programs."""
    for number, equation in enumerate(body.jaxpr.eqns):
        for called in body.called[number]:
            yield from _of_matmuls(program, called)
        if equation.primitive.name in MATMULS:
            for dim in body.shapes[equation.outvars[0]]:
                yield from program.dims.atoms(dim)


def batch_atoms(program: Program) -> tuple[int, ...]:
    """Return the atoms of the batch. The first is that of the leading dim of data which occurs in most matmuls.

    Data are the arguments that are not state. Other leading dims of data with the same size follow, e.g. the items of
    a recommender, where its users are the first.
    """
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (_, shape) in enumerate(program.arguments):
        if number not in program.state:
            for place, dim in enumerate(shape):
                for atom in program.dims.atoms(dim)[:1]:
                    places[atom].append((place, number))
    counts = Counter(_of_matmuls(program, program.body))

    def rank(atom: int) -> tuple[int, bool, int]:
        # Frozen parameters usually come before the data.
        return counts[atom], all(place == 0 for place, _ in places[atom]), max(number for _, number in places[atom])

    barred = program.dims.why_barred()
    leading = [atom for atom, found in places.items() if any(place == 0 for place, _ in found) and atom not in barred]
    if not leading:
        return ()
    first, size = max(leading, key=rank), program.dims.size
    return (first, *(atom for atom in leading if atom != first and size((atom,)) == size((first,)) and rank(atom)[1]))


def _names(members: list[tuple[str, str]], vectors: set[str], *, is_batch: bool) -> Iterator[str]:
    """Yield candidate names of a class, best first: `batch`, or the end of a member's path.

    members: (path, dim index) as from `_members`. vectors: the paths of arrays with at most one dim.
    """
    if is_batch:
        yield "batch"
    # Matrices have more specific names than vectors, and parameters have shorter paths than their moments.
    path, place = min(members, key=lambda member: (member[0] in vectors, len(member[0]), member))
    parts = path.split(".")
    named = (place for place in range(len(parts) - 1, 0, -1) if not (parts[place] in GENERIC or parts[place].isdigit()))
    start = next(named, 0)
    yield from (".".join(parts[first:]) + place for first in range(start, -1, -1))
    yield from (path + place for path, place in members)


def _members(program: Program) -> dict[int, list[tuple[str, str]]]:
    """Return {atom: a pair for each dim that has it: (path of an argument, text such as `:1` or `:1.2`)}.

    `:1` is dim 1 of the argument; `:1.2` is part 2 of this dim if it has several atoms.
    """
    found: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for path, shape in program.arguments:
        for place, dim in enumerate(shape):
            atoms = program.dims.atoms(dim)
            for part, atom in enumerate(atoms):
                found[atom].append((path, f":{place}" + (f".{part}" if len(atoms) > 1 else "")))
    return found


def table_by_name(classes: tuple[DimClass, ...], table: Mapping[int, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Convert a table, the mesh axes of each class, from keys `DimClass.atom` to class names, in the same order."""
    names = {one.atom: one.name for one in classes}
    return {names[atom]: axes for atom, axes in table.items() if atom in names}


def find_classes(classes: tuple[DimClass, ...], table: Mapping[str, object]) -> dict[str, DimClass]:
    """Return the class of each key of a table. A key is a class's name or a member, `*` matching any text.

    Raises:
        MeshwrightError: a key names no class, several classes, one that another key names, or one that no axis may
            split.
    """
    found: dict[str, DimClass] = {}
    for key in table:
        named = [one for one in classes if one.name == key]
        named = named or [one for one in classes if any(fnmatchcase(member, key) for member in one.members)]
        if len(named) != 1:
            names = ", ".join(one.name for one in named or classes)
            what = f"names {len(named)} classes of dims" if named else "names no class of dims"
            raise MeshwrightError(f"{key!r} {what}; {'they are' if named else 'classes are'} {names}")
        if other := next((other for other, one in found.items() if one is named[0]), None):
            raise MeshwrightError(f"{key!r} and {other!r} name the same class of dims, {named[0].name}; leave one out")
        if named[0].barred:
            raise MeshwrightError(f"{key!r} cannot be split: {named[0].barred}")
        found[key] = named[0]
    return found
