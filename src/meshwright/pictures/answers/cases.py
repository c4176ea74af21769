"""`meshwright.matmul_cases`: the scaling book's four cases of a sharded matmul side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.mesh import MeshShape
from meshwright.options.values import Count, SystemLike
from meshwright.pictures.answers.answer import DrawnAnswer
from meshwright.pictures.answers.given import Numbers, read_numbers
from meshwright.pictures.answers.matmul import Matmul, matmul
from meshwright.pictures.picture import Picture
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.units import show_bytes, show_mesh, show_range

CASES = (
    "A[I_{axis}, J] @ B[J, K] -> C[I_{axis}, K]",
    "A[I, J_{axis}] @ B[J, K] -> C[I, K]",
    "A[I, J_{axis}] @ B[J_{axis}, K] -> C[I, K]",
    "A[I_{axis}, J] @ B[J, K_{axis}] -> C[I_{axis}, K]",
)
"""A matmul for each case, 1 to 4, with the name of the mesh axis left open."""


@dataclass(frozen=True, repr=False)
class MatmulCases(DrawnAnswer):
    """A matmul for each of the scaling book's four cases, sharded over one mesh axis.

    matmuls: case 1, neither contracting dim is sharded; case 2, one operand's contracting dim is; case 3, both
    contracting dims are; case 4, both operands shard a dim of the result over the same axis.
    """

    matmuls: tuple[Matmul, ...]

    @property
    def picture(self) -> Picture:
        """The operands, partial sums and result of each case, one below the other."""
        return Picture(tuple(sketch for found in self.matmuls for sketch in found.picture.sketches[:1]))

    def to_json(self) -> dict[str, Any]:
        """Return each case as plain data."""
        return {"cases": [found.to_json() for found in self.matmuls]}

    def print(self) -> None:
        """Print a row for each case: the matmul, its collectives and its time."""
        first = self.matmuls[0]
        mesh = show_mesh(first.mesh)
        show(console(), f"the four cases of A @ B   {mesh} on {first.system}")
        print()
        rows = []
        for found in self.matmuls:
            way = found.ways[0]
            moves = ", ".join(f"{move.kind} of {move.array}" for move in way.collectives) or "nothing moves"
            size = show_bytes(sum(move.bytes for move in way.collectives)) if way.collectives else "–"
            times = show_range(*found.seconds)
            rows.append((str(found.case), found.product, size, times, found.bound or "nothing", moves))
        heads = ("case", "matmul", "network", "together", "bound by", "")
        show(console(), table(heads, rows, left=(0, 1, 4, 5), folds=-1))
        print()
        for case, rule in enumerate(_RULES, start=1):
            print(folded(f"{case}: {rule}"))
        for note in first.notes:
            print(folded(note))


def matmul_cases(
    *,
    mesh: Numbers | MeshShape | None = None,
    dims: Numbers | None = None,
    on: SystemLike | None = None,
    dtype: str = "bf16",
    device: int | None = None,
    **sizes: Count,
) -> MatmulCases:
    """Return the four cases of A[I, J] @ B[J, K] -> C[I, K], sharded over the first axis of the mesh.

    Arguments and errors are as in `meshwright.matmul`.

    >>> [found.ways[0].collectives[0].kind for found in matmul_cases(X=4, on="v5e:2x4").matmuls[1:]]
    ['all-reduce', 'all-reduce', 'all-gather']
    """
    named = read_numbers(mesh) if mesh else {name: 1 for name in sizes if name not in ("I", "J", "K")}
    axis = next(iter(named), "X")
    products = [case.format(axis=axis) for case in CASES]
    given: dict[str, Any] = {"mesh": mesh, "dims": dims, "on": on, "dtype": dtype, "device": device, **sizes}
    return MatmulCases(tuple(matmul(product, **given) for product in products))


_RULES = (
    "nothing splits the summed dim, and no axis splits both others: no communication",
    "an axis splits the summed dim of one operand: gather that operand, or slice the other and sum",
    "an axis splits the summed dim of both: each device has a partial sum",
    "an axis splits both other dims: the result would have it twice, so one operand is gathered",
)
