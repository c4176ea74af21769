"""Exercises on which device holds which part of an array."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number, Several

MESH = {"X": 2, "Y": 4}
_LARGE = Sizes(degrees=MESH, dims={"I": 8192, "J": 8192})
_SMALL = Sizes(degrees=MESH, dims={"I": 8, "J": 8})

SPECS = {
    "P('X', 'Y')": "A[I_X, J_Y]",
    "P('Y', 'X')": "A[I_Y, J_X]",
    "P(('X', 'Y'), None)": "A[I_XY, J]",
    "P(None, 'X')": "A[I, J_X]",
    "P('Y')": "A[I_Y, J]",
    "P()": "A[I, J]",
}
"""Partition specs, each with the same sharding in the scaling book's notation."""


def _held(array: str) -> float:
    return _LARGE.local_bytes(parse_array(array))


_THREE = Sizes(degrees={**MESH, "Z": 8}, dims={})


def _copies(array: str) -> float:
    """Return how many devices hold the same shard of an array, such as `A[I_X, J]`, on the mesh of `_THREE`."""
    return _THREE.degree(_THREE.degrees) / _THREE.degree(parse_array(array).split_axes)


def _shapes() -> dict[str, tuple[int, ...]]:
    return {spec: _SMALL.local_shape(parse_array(array, axes=tuple(MESH))) for spec, array in SPECS.items()}


EXERCISES: Mapping[str, Exercise] = {
    "bytes-held": Number(
        question="A[I_X, J] in bf16, I=J=8192, on a mesh with X=2 and Y=4: how many bytes does each device hold?",
        unit="B",
        answer=lambda: _held("A[I_X, J]"),
        mistakes=(
            Mistake(lambda: _held("A[I_X, J_Y]"), "Y splits nothing here: along Y there are copies."),
            Mistake(lambda: _held("A[I, J]"), "That is the whole array; X splits its rows."),
            Mistake(lambda: _held("A[I_Y, J]"), "X has degree 2, and Y does not split A."),
            Mistake(lambda: 2 * _held("A[I, J]"), "An element of bf16 has 2 bytes, and X splits the rows."),
        ),
        hints=(
            "Only axes that the notation writes at a dim split it.",
            "X has degree 2: a device holds half of the rows.",
            "8192 / 2 rows of 8192 elements of 2 bytes.",
        ),
        because="An axis that is not written makes copies, and copies take memory on every device.",
    ),
    "copies-of-a-block": Number(
        question="A[I_X, J] on a mesh with X=2, Y=4 and Z=8: how many devices hold the first block of rows?",
        answer=lambda: _copies("A[I_X, J]"),
        mistakes=(
            Mistake(lambda: MESH["X"], "That is the number of blocks. How many devices are there for each?"),
            Mistake(lambda: _copies("A[I, J]"), "That would be an array that nothing splits."),
            Mistake(lambda: _copies("A[I_X, J_Y]"), "That would be A[I_X, J_Y]. There are copies along Y too."),
            Mistake(lambda: _copies("A[I_X, J_Z]"), "That would be A[I_X, J_Z]. There are copies along Z too."),
        ),
        hints=(
            "How many devices are there, and how many blocks?",
            "Devices with the same coordinate along X hold the same block.",
            "For each coordinate along X there is a device for every pair of coordinates along Y and Z.",
        ),
        because="Copies along Y and Z: if each device changes its copy, somebody has to keep them equal.",
    ),
    "shapes-of-shards": Several(
        question="A has shape (8, 8), the mesh is X=2,Y=4. Which shape has one device's part under each spec?",
        answer=_shapes,
        values=((8, 8), (4, 2), (2, 4), (1, 8), (8, 4), (2, 8), (8, 2), (4, 8), (8, 1), (4, 4)),
        mistakes=(
            Mistake(
                lambda: {**_shapes(), "P('Y', 'X')": (4, 2)},
                "The place in the spec is the dim; the name is the axis. Y has degree 4, wherever it stands.",
            ),
            Mistake(
                lambda: {**_shapes(), "P(('X', 'Y'), None)": (4, 2)},
                "Two axes in one place split one dim, by both degrees.",
            ),
            Mistake(
                lambda: {**_shapes(), "P('Y')": (8, 2)}, "A spec begins at the first dim; what it leaves out is whole."
            ),
        ),
        hints=(
            "Divide each dim by the degrees of the axes in its place.",
            "None, and what is left out at the end, divides by 1. ('X', 'Y') divides by 8.",
            "jax.NamedSharding(mesh, spec).shard_shape((8, 8)) says it.",
        ),
        because="A spec has a place for each dim, and the names of axes in it.",
    ),
    "a-dim-that-does-not-divide": Choice(
        question="Inside jit, a constraint asks for P('X') of an array of 17 rows, X=8. What happens?",
        options={
            "a": "An error: 17 does not divide by 8.",
            "b": "Devices get 3 or 2 rows.",
            "c": "The array is padded to 24 rows, and split.",
            "d": "Nothing is said, and every device holds the whole array.",
        },
        answer="d",
        replies={
            "a": "device_put raises. A constraint inside jit does not: run the cell above again.",
            "b": "All shards of a jax.Array have one shape.",
            "c": "A compiler may pad inside of a program; look at what came out of it above.",
        },
        hints=(
            "The cell above does it: look at the sharding of what came out.",
            "Which part of the array does each device hold there?",
            "It prints the shape of a shard, (17, 16): that is all of it.",
        ),
        because="The result was whole everywhere. meshwright inspect finds such constraints.",
    ),
}
