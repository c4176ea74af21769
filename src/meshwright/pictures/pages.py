"""The HTML pages of a verification and of an inspection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from meshwright.description.hardware.system import parse_system
from meshwright.pictures.document import Section, html_table, render
from meshwright.pictures.rows import costs, short_path, summary
from meshwright.pictures.screens.comparison import row_tables
from meshwright.pictures.sections import buffers_section, collectives_section, memory_section, timeline_section
from meshwright.proof.compiler.records import read_optimized
from meshwright.proof.inspection.finding import Finding
from meshwright.proof.inspection.inspection import Inspection
from meshwright.proof.simulate.buffers import read_buffers
from meshwright.proof.verification.plans import Verification
from meshwright.record import Record
from meshwright.units import show_degrees, show_flops, show_percent, show_seconds


def verify_page(found: Verification, measured: Record | None = None) -> str:
    """Return the HTML page of a verification: all quantities, memory, collectives, the timeline.

    measured: the record of a run, if there is one.
    """
    plan, program, workload = found.plan, found.program, found.plan.workload
    records = {"predicted": plan.predicted, "compiled": found.compiled}
    if measured is not None and measured.memory_bytes:
        records["measured"] = measured
    lines = (
        f"{workload.sequences} × {workload.seq_len} tokens{workload.in_pairs}, {workload.compute_dtype},"
        f" remat {workload.remat}",
        f"compiled by {program.compiler} in {show_seconds(program.compile_seconds)}",
        f"{sum(row.is_equal for row in found.rows)} of {len(found.rows)} quantities are equal",
    )
    usable = plan.system.usable_bytes if plan.system.chip.kind != "cpu" else None
    tables = [
        html_table(columns, cells, text=(0, len(columns) - 1), differs=differs)
        for columns, cells, differs in row_tables(found.rows)
    ]
    sections = (
        Section("Predicted and compiled", "<br>\n".join(tables)),
        memory_section(records, usable),
        # The order of ops, which determines the live buffers, is final if a step was simulated.
        buffers_section(read_buffers(read_optimized(program)).live if found.schedule else ()),
        collectives_section(found.compiled),
        timeline_section(found.schedule),
        _notes_section((*plan.predicted.notes, *found.compiled.notes)),
    )
    return render(f"{workload.model.name} · {plan.mesh} on {plan.hardware}", lines, sections)


def inspection_page(found: Inspection, trace: str | None = None) -> str:
    """Return the HTML page of an inspection: findings, memory, collectives, the timeline, and flops.

    trace: the path of a trace file to which the page links, relative to the page.
    """
    record, program = found.record, found.program
    mesh = show_degrees(record.mesh)
    lines = [summary(found).replace("   ", " · "), f"{show_flops(found.flops)} a device and step, in matmuls"]
    if program is not None:
        lines.append(f"compiled by {program.compiler}")
    total = found.flops or 1.0
    flops = [
        (name or "(no scope)", show_flops(part), show_percent(part / total))
        for name, part in found.flops_by_scope.items()
    ]
    usable = parse_system(record.hardware).usable_bytes if record.fits is not None else None
    sections = (
        findings_section(found.findings),
        memory_section({"compiled": record} if record.memory_bytes else {}, usable),
        buffers_section(found.buffers),
        collectives_section(record),
        timeline_section(found.schedule, trace),
        Section("Flops by scope", html_table(("scope", "flops", "share"), flops)),
        _notes_section(record.notes),
    )
    on = f" on {record.hardware}" if record.hardware else ""
    return render(f"{found.name} · {mesh}{on}", lines, sections)


def findings_section(findings: Sequence[Finding]) -> Section:
    """Return a section with each finding: evidence, cost, source and fix."""
    return Section("Findings", "\n".join(_finding(number, one) for number, one in enumerate(findings, 1)))


def _notes_section(notes: Iterable[str]) -> Section:
    """Return a section with notes, without repetitions."""
    return Section("Notes", "\n".join(f"<p>{escape(note)}</p>" for note in dict.fromkeys(notes)))


def _finding(number: int, finding: Finding) -> str:
    place = f"<p><code>{escape(short_path(finding.source))}</code></p>" if finding.source else ""
    return (
        f'<div class="finding">\n<p><strong>{number}. {escape(finding.kind)}</strong> [{finding.id}]'
        f" {escape(costs(finding))}</p>\n"
        f"<p>{escape(finding.evidence)}</p>\n{place}\n<p>fix: {escape(finding.fix)}</p>\n</div>"
    )
