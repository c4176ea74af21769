"""The HTML page of a verification."""

from __future__ import annotations

from meshwright.record import Record
from meshwright.units import show_seconds
from meshwright.verification import Row, Verification
from meshwright.viz.bars import collectives_section, memory_section
from meshwright.viz.document import Section, html_table, render
from meshwright.viz.findings_section import notes_section
from meshwright.viz.timeline import timeline_section
from meshwright.viz.words import row_cells


def verify_page(found: Verification, measured: Record | None = None) -> str:
    """The page of a verification: every quantity side by side, memory, collectives by axes, the timeline."""
    plan, program, workload = found.plan, found.program, found.plan.workload
    records = {"predicted": plan.predicted, "compiled": found.compiled}
    if measured is not None and measured.memory_bytes:
        records["measured"] = measured
    lines = (
        f"{workload.batch} × {workload.seq_len} tokens, {workload.compute_dtype}, remat {workload.remat}",
        f"compiled by {program.compiler} in {show_seconds(program.compile_seconds)}",
    )
    usable = plan.system.usable_bytes if plan.system.chip.kind != "cpu" else None
    sections = (
        _comparison(found.rows),
        memory_section(records, usable),
        collectives_section(found.compiled),
        timeline_section(found.schedule),
        notes_section((*plan.predicted.notes, *found.compiled.notes)),
    )
    return render(f"{workload.model.name} · {plan.mesh} on {plan.hardware}", lines, sections)


def _comparison(rows: tuple[Row, ...]) -> Section:
    """Every quantity: predicted, compiled, measured if there was a run, and why they differ."""
    ran = any(row.measured is not None for row in rows)
    columns = ("quantity", "predicted", "compiled", "difference", *(["measured", "difference"] if ran else []), "")
    lines = [row_cells(row, with_measured=ran) for row in rows]
    return Section("Predicted and compiled", html_table(columns, lines, text=(0, len(columns) - 1)))
