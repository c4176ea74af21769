"""Run every check on a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.inspection.checks.constraints import constraints_without_effect
from meshwright.inspection.checks.duplicate_gathers import duplicate_gathers
from meshwright.inspection.checks.duplicate_reductions import duplicate_reductions
from meshwright.inspection.checks.exposed_collectives import exposed_collectives
from meshwright.inspection.checks.full_rematerializations import full_rematerializations
from meshwright.inspection.checks.mesh_order import mesh_order
from meshwright.inspection.checks.missing_sums import missing_sums
from meshwright.inspection.checks.padding import padding
from meshwright.inspection.checks.redundant_compute import redundant_compute
from meshwright.inspection.checks.replicated_batches import replicated_batches
from meshwright.inspection.checks.replicated_parameters import replicated_parameters
from meshwright.inspection.checks.replicated_states import replicated_states
from meshwright.inspection.checks.sliced_all_reduces import sliced_all_reduces
from meshwright.inspection.checks.undonated_buffers import undonated_buffers
from meshwright.inspection.checks.uneven_stages import uneven_stages
from meshwright.inspection.checks.unexpected_collectives import unexpected_collectives
from meshwright.inspection.context import ProgramContext
from meshwright.inspection.finding import Finding

CHECKS: tuple[Callable[[ProgramContext], Iterator[Finding]], ...] = (
    redundant_compute,
    replicated_parameters,
    replicated_states,
    replicated_batches,
    undonated_buffers,
    constraints_without_effect,
    full_rematerializations,
    unexpected_collectives,
    sliced_all_reduces,
    duplicate_gathers,
    duplicate_reductions,
    missing_sums,
    mesh_order,
    exposed_collectives,
    padding,
    uneven_stages,
)


def run_checks(context: ProgramContext) -> tuple[Finding, ...]:
    """The findings of a program, most expensive first: by seconds, then by bytes.

    Findings of one kind at one place in the source are merged, their costs added up.
    """
    merged: dict[object, Finding] = {}
    for check in CHECKS:
        for finding in check(context):
            alike = (type(finding), finding.source, *(getattr(finding, name) for name in finding.merged_by))
            key = alike if finding.source else finding
            merged[key] = _merge(merged[key], finding) if key in merged else finding
    return tuple(sorted(merged.values(), key=lambda found: (-(found.seconds or 0.0), -found.bytes)))


def _merge(first: Finding, other: Finding) -> Finding:
    """Both findings as one, with the figures of the larger and the cost of both."""
    known = first.seconds is not None and other.seconds is not None
    return replace(
        max(first, other, key=lambda found: found.bytes),
        bytes=first.bytes + other.bytes,
        seconds=(first.seconds or 0.0) + (other.seconds or 0.0) if known else None,
    )
