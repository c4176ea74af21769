"""--tolerance of `meshwright verify`: the largest difference that counts as equal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.proof.verification.comparison import Row


def read_tolerance(tolerance: float | None) -> float | None:
    """Return the value of --tolerance (None if it is not given) as it is; raise if it is negative."""
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
