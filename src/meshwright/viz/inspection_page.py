"""The HTML page of an inspection."""

from __future__ import annotations

from meshwright.hardware import parse_system
from meshwright.inspection import Inspection
from meshwright.units import show_flops, show_percent
from meshwright.viz.bars import collectives_section, memory_section
from meshwright.viz.document import Section, html_table, render
from meshwright.viz.findings_section import findings_section, notes_section
from meshwright.viz.timeline import timeline_section


def inspection_page(found: Inspection) -> str:
    """The page of an inspection: findings first, then memory, collectives by axes, flops and the timeline."""
    record, program = found.record, found.program
    mesh = ",".join(f"{axis}={degree}" for axis, degree in record.mesh.items() if degree > 1) or "one device"
    lines = [f"{show_flops(found.flops)} a device and step, in products"]
    if program is not None:
        lines.append(f"compiled by {program.compiler}")
    usable = parse_system(record.hardware).usable_bytes if record.fits is not None else None
    sections = (
        findings_section(found.findings),
        memory_section({"compiled": record} if record.memory_bytes else {}, usable),
        collectives_section(record),
        timeline_section(found.schedule),
        _flops(found),
        notes_section(record.notes),
    )
    on = f" on {record.hardware}" if record.hardware else ""
    return render(f"{found.name} · {mesh}{on}", lines, sections)


def _flops(found: Inspection) -> Section:
    total = found.flops or 1.0
    rows = [
        (scope or "–", show_flops(flops), show_percent(flops / total)) for scope, flops in found.flops_by_scope.items()
    ]
    return Section("Flops by scope", html_table(("scope", "flops", "share"), rows))
