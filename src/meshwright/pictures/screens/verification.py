"""The output of `meshwright verify`: predicted, compiled and measured quantities, as tables or as plain data."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from meshwright.pictures.screens.comparison import reason, row_tables
from meshwright.pictures.tables import console, headline, show, table
from meshwright.pictures.text import folded
from meshwright.planning.plan import Plan
from meshwright.record import Record
from meshwright.units import show_seconds

if TYPE_CHECKING:
    from meshwright.proof.verification.plans import Verification
    from meshwright.proof.verification.serving import ServingVerification


def screen_text(found: Verification | ServingVerification) -> str:
    """Return what `meshwright verify` prints for a verification, as plain text."""
    with redirect_stdout(io.StringIO()) as out:
        print_verification(found)
    return out.getvalue().rstrip()


def title(found: Verification | ServingVerification) -> str:
    """Return the workload and the hardware of a verification, as a line of text."""
    plan = found.plan
    if isinstance(plan, Plan):
        return headline(plan.workload, plan.hardware)
    serving = plan.serving
    answers = f" + {serving.output_len}" if serving.phase == "decode" else ""
    chunks = "" if serving.chunk is None else f" in chunks of {serving.chunk}"
    tokens = f"{plan.batch:,} × {serving.prompt_len:,}{answers} tokens{chunks}"
    formats = f"weights {serving.weight_dtype}, cache {serving.kv_dtype}, matmuls {serving.compute_dtype}"
    return f"{serving.model.name} · {serving.phase} · {tokens} · {formats} · {plan.hardware}"


def verification_data(found: Verification | ServingVerification, measured: Record | None = None) -> dict[str, Any]:
    """Return a verification as plain data: its records, its rows, and the rows that differ.

    measured: the record of a run, if there is one.
    """
    records = {"predicted": found.plan.predicted.to_json(), "compiled": found.compiled.to_json()}
    if measured:
        records["measured"] = measured.to_json()
    rows = [row.to_json() | {"reason": reason(row)} for row in found.rows]
    differences = [data for row, data in zip(found.rows, rows, strict=True) if not row.is_equal]
    return records | {"rows": rows, "differences": differences}


def print_verification(found: Verification | ServingVerification) -> None:
    """Print the table of a verification, then a table of the measured quantities, if any."""
    plan, program, rows = found.plan, found.program, found.rows
    took = f"in {show_seconds(program.compile_seconds)}{' (cached)' if program.cached else ''}"
    show(console(), title(found))
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
