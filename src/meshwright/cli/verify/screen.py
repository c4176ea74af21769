"""The screen of `meshwright verify`: the rows of a comparison, as tables or data, and what exceeds a tolerance."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.pictures.screens.comparison import reason, row_tables
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.record import Record
from meshwright.units import show_seconds

if TYPE_CHECKING:
    from meshwright.proof.verification.comparison import Row
    from meshwright.proof.verification.plans import Verification
    from meshwright.proof.verification.serving import ServingVerification


def read_tolerance(tolerance: float | None) -> float | None:
    """Parse --tolerance. Raises if it is negative."""
    if tolerance is not None and tolerance < 0:
        raise MeshwrightError(f"--tolerance is {tolerance:g}; it is a share from 0, as 0.1")
    return tolerance


def exit_code(rows: Iterable[Row], tolerance: float | None) -> int:
    """Return 1 if a difference exceeds the tolerance, with a line on stderr; else 0."""
    beyond = [] if tolerance is None else [row for row in rows if row.exceeds(tolerance)]
    if beyond and tolerance is not None:
        names = ", ".join(row.quantity for row in beyond)
        print(f"beyond --tolerance {tolerance:g}: {names}", file=sys.stderr)
    return int(bool(beyond))


def verification_data(found: Verification | ServingVerification, measured: Record | None = None) -> dict[str, Any]:
    """Return all of a verification as plain data."""
    records = {"predicted": found.plan.predicted.to_json(), "compiled": found.compiled.to_json()}
    if measured:
        records["measured"] = measured.to_json()
    rows = [row.to_json() | {"reason": reason(row)} for row in found.rows]
    differences = [data for row, data in zip(found.rows, rows, strict=True) if not row.is_equal]
    return records | {"rows": rows, "differences": differences}


def print_verification(found: Verification | ServingVerification, title: str) -> None:
    """Print the table of a verification, and another of the quantities that a run measured."""
    plan, program, rows = found.plan, found.program, found.rows
    took = f"in {show_seconds(program.compile_seconds)}{' (cached)' if program.cached else ''}"
    show(console(), title)
    layout = getattr(plan, "layout", plan.mesh)
    show(console(), f"mesh {layout} · compiled by {program.compiler} {took}")
    print()
    for columns, cells, differs in row_tables(rows):
        styles = ["yellow" if is_marked else "" for is_marked in differs]
        show(console(), table(columns, cells, left=(0, -1), folds=-1, styles=styles))
        print()
    different = sum(not row.is_equal for row in rows)
    print(f" {len(rows) - different} of {len(rows)} quantities are equal; {different} differ, each named above")
    for note in dict.fromkeys((*plan.predicted.notes, *found.compiled.notes)):
        print(folded(f"note: {note}"))
