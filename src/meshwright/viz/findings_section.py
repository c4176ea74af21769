"""Findings and notes as sections of an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.inspection import Finding
from meshwright.inspection.words import evidence, fix
from meshwright.units import show_bytes, show_seconds
from meshwright.viz.document import Section, paragraphs


def findings_section(findings: Sequence[Finding]) -> Section:
    """Each finding: evidence, cost, source, and what to change."""
    return Section("Findings", "\n".join(_finding(number, one) for number, one in enumerate(findings, 1)))


def notes_section(notes: Sequence[str]) -> Section:
    """Notes, each once."""
    return Section("Notes", paragraphs(list(dict.fromkeys(notes))))


def _finding(number: int, finding: Finding) -> str:
    costs = [show_seconds(finding.seconds)] if finding.seconds is not None else []
    costs += [show_bytes(finding.bytes)] if finding.bytes else []
    said = f"costs {' and '.join(costs)} a step" if costs else ""
    place = f"<p><code>{escape(finding.source)}</code></p>" if finding.source else ""
    return (
        f'<div class="finding">\n<p><strong>{number}. {escape(finding.kind)}</strong> {escape(said)}</p>\n'
        f"<p>{escape(evidence(finding))}</p>\n{place}\n<p>fix: {escape(fix(finding))}</p>\n</div>"
    )
