"""Every kind of mistake looked for in one program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.inspection.checks.constraints import constraints_without_effect, full_rematerializations
from meshwright.inspection.checks.duplicate_collectives import all_reduce_for_scatter, gathered_twice, reduced_twice
from meshwright.inspection.checks.exposed import exposed_communication
from meshwright.inspection.checks.fabric import mesh_against_fabric
from meshwright.inspection.checks.padding import padding
from meshwright.inspection.checks.parameters import replicated_parameters
from meshwright.inspection.checks.redundant_compute import repeated_work, uneven_stages
from meshwright.inspection.checks.unexpected_collectives import unplanned_collectives
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject

_LOOKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    repeated_work,
    replicated_parameters,
    constraints_without_effect,
    full_rematerializations,
    unplanned_collectives,
    all_reduce_for_scatter,
    gathered_twice,
    reduced_twice,
    mesh_against_fabric,
    exposed_communication,
    padding,
    uneven_stages,
)


def find(subject: Subject) -> tuple[Finding, ...]:
    """The findings of a program, what costs most first: by seconds, those without any by bytes.

    Alike ones from one place in the source are one, their costs added up.
    """
    merged: dict[tuple[str, str, str], Finding] = {}
    for look in _LOOKS:
        for finding in look(subject):
            key = (
                (finding.kind, finding.source, finding.fix) if finding.source else (finding.kind, "", finding.evidence)
            )
            merged[key] = _added(merged[key], finding) if key in merged else finding
    return tuple(sorted(merged.values(), key=lambda found: (-(found.seconds or 0.0), -found.bytes)))


def _added(first: Finding, other: Finding) -> Finding:
    """Two alike findings from one place as one, in the words of the larger."""
    larger = max(first, other, key=lambda found: found.bytes)
    known = first.seconds is not None and other.seconds is not None
    return Finding(
        kind=larger.kind,
        evidence=larger.evidence,
        bytes=first.bytes + other.bytes,
        seconds=(first.seconds or 0.0) + (other.seconds or 0.0) if known else None,
        source=larger.source,
        fix=larger.fix,
    )
