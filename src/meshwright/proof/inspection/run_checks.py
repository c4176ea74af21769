"""Run every check on a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.proof.inspection.checks.accidental_values import accidental_values
from meshwright.proof.inspection.checks.changed_states import changed_states
from meshwright.proof.inspection.checks.constraints import constraints_without_effect
from meshwright.proof.inspection.checks.duplicate_gathers import duplicate_gathers
from meshwright.proof.inspection.checks.duplicate_reductions import duplicate_reductions, recomputed_collectives
from meshwright.proof.inspection.checks.exposed_collectives import exposed_collectives
from meshwright.proof.inspection.checks.full_rematerializations import full_rematerializations
from meshwright.proof.inspection.checks.hoisted_gathers import hoisted_gathers
from meshwright.proof.inspection.checks.loop_sums import loop_sums
from meshwright.proof.inspection.checks.manual_collectives import manual_collectives
from meshwright.proof.inspection.checks.mesh_order import AcrossSlices, across_slices, mesh_order
from meshwright.proof.inspection.checks.missing_sums import missing_sums
from meshwright.proof.inspection.checks.moved_values import moved_values
from meshwright.proof.inspection.checks.padding import padding
from meshwright.proof.inspection.checks.random_bits import random_bits, same_random_bits
from meshwright.proof.inspection.checks.redundant_compute import redundant_compute
from meshwright.proof.inspection.checks.replicated_batches import replicated_batches, whole_tables
from meshwright.proof.inspection.checks.replicated_parameters import replicated_parameters
from meshwright.proof.inspection.checks.replicated_states import mislaid_states, replicated_states
from meshwright.proof.inspection.checks.sliced_all_reduces import sliced_all_reduces
from meshwright.proof.inspection.checks.split_contractions import split_contractions
from meshwright.proof.inspection.checks.undonated_buffers import undonated_buffers
from meshwright.proof.inspection.checks.uneven_stages import uneven_stages
from meshwright.proof.inspection.checks.unexpected_collectives import unexpected_collectives
from meshwright.proof.inspection.checks.unsharding_constraints import unsharding_constraints
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, line_of
from meshwright.units import show_degrees, show_seconds

Check = Callable[[ProgramContext], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    redundant_compute,
    replicated_parameters,
    replicated_states,
    mislaid_states,
    replicated_batches,
    undonated_buffers,
    constraints_without_effect,
    full_rematerializations,
    unexpected_collectives,
    sliced_all_reduces,
    duplicate_gathers,
    duplicate_reductions,
    missing_sums,
    same_random_bits,
    manual_collectives,
    changed_states,
    accidental_values,
    recomputed_collectives,
    mesh_order,
    across_slices,
    exposed_collectives,
    padding,
    uneven_stages,
)

CHECKS_OF_DATAFLOW: tuple[Check, ...] = (
    loop_sums,
    hoisted_gathers,
    unsharding_constraints,
    split_contractions,
    moved_values,
    whole_tables,
    random_bits,
)
"""Checks that follow values from op to op. Fusion hides these paths, so they also run on the partitioned program."""

_LEAST_SECONDS = 1e-6
"""The smallest cost of a finding, in seconds per step. Cheaper mistakes are only mentioned in a note."""

_LEAST_SHARE = 1e-4
"""The smallest cost of a finding as a fraction of a simulated step."""

_MOST_NOTED = 3
"""The maximum number of cheaper mistakes that the note names."""


def run_checks(context: ProgramContext) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return a program's findings, most expensive first (seconds, then bytes), and notes on cheaper mistakes.

    Findings of one kind at one source line are merged and their costs added. A finding that only follows from another
    one is left out.
    """
    merged: dict[object, Finding] = {}
    for finding in _found(context):
        same = tuple(getattr(finding, name) for name in finding.merged_by)
        place = "" if finding.is_merged_across_sources else finding.line if finding.is_at_one_line else finding.source
        key = (type(finding), place, *same) if place or finding.is_merged_across_sources else finding
        merged[key] = _merge(merged[key], finding) if key in merged else finding
    # Findings that another one explains are dropped; the cost of redundant work is added to that of its cause.
    found = list(merged.values())
    causes = [one for one in found if not any(other.explains(one) for other in found if other is not one)]
    rest = [one for one in found if one not in causes and one.is_share_of_work]
    for one in rest:
        number = next((place for place, cause in enumerate(causes) if cause.explains(one)), None)
        if number is not None:
            cause = causes[number]
            known = cause.cost_seconds is not None and one.cost_seconds is not None
            seconds = (cause.cost_seconds or 0.0) + (one.cost_seconds or 0.0) if known else None
            causes[number] = replace(cause, cost_seconds=seconds)
    told = [_with_link(context, finding) for finding in causes]
    told = sorted(told, key=lambda found: (-(found.cost_seconds or 0.0), -found.bytes))
    step = context.schedule.step_seconds if context.schedule else 0.0
    least = max(_LEAST_SECONDS, _LEAST_SHARE * step)
    small = [
        found
        for found in told
        if 0 < (found.cost_seconds or 0.0) < least and not (found.is_wrong or found.is_share_of_work)
    ]
    return tuple(found for found in told if found not in small), (
        *_unknown(context),
        *_of_text(context),
        *_notes(small, least),
    )


def _found(context: ProgramContext) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    for check in CHECKS:
        yield from check(context)
    for check in CHECKS_OF_DATAFLOW:
        found = list(check(context))
        yield from found
        if context.partitioned is not context:
            known = {type(one) for one in found}
            yield from (one for one in check(context.partitioned) if type(one) not in known)


def _with_link(context: ProgramContext, finding: Finding) -> Finding:
    """Return a finding with its `link` set to the links that its collectives use; unchanged for simulated devices."""
    axes = tuple(axis for axis in getattr(finding, "axes", ()) if context.mesh[axis] > 1)
    if isinstance(finding, AcrossSlices):
        return replace(finding, link="the data-centre network")
    if context.layout is None or not context.has_reduce_scatter or not axes or not finding.cost_seconds:
        return finding
    return replace(finding, link=str(context.layout.placement(axes)))


def _unknown(context: ProgramContext) -> Iterator[str]:
    """Yield a note if the shardings of all arguments are unknown, so that most checks find nothing."""
    told = any("sharding" in argument.instruction.attributes for argument in context.arguments)
    if context.arguments and context.module.num_devices > 1 and not told:
        yield (
            "the text does not say how the arguments are sharded, which JAX prints no more from 0.12 on: most mistakes"
            " cannot be found in it; inspect the function, what .compile() returns, or a file of XLA's dump with the"
            " others beside it (XLA_FLAGS=--xla_dump_to=DIRECTORY)"
        )


def _of_text(context: ProgramContext) -> Iterator[str]:
    """Yield notes on HLO text: a mesh that it was not compiled for, and times that are unknown without hardware."""
    if context.program is not None or not context.collectives:
        return
    strange = sum(not move.collective.axes for move in context.collectives)
    if 2 * strange > len(context.collectives):
        yield (
            f"the device groups of {strange} of {len(context.collectives)} collectives match no axes of"
            f" {show_degrees(context.mesh)}: give the mesh that the program was compiled for, its axes in that order"
        )
    if context.system is None:
        yield "no times, and no findings that need them: --on CHIPS (on=…) gives the hardware"


def _notes(small: list[Finding], least: float) -> Iterator[str]:
    """Yield a note on the mistakes that cost less than `least` seconds."""
    if small:
        each = "; ".join(
            f"{found.kind}{f' at {found.line}' if found.line else ''} ({show_seconds(found.cost_seconds or 0.0)})"
            for found in small[:_MOST_NOTED]
        )
        rest = f"; {len(small) - _MOST_NOTED} more" if len(small) > _MOST_NOTED else ""
        yield f"under {show_seconds(least)} a step, so no findings: {each}{rest}"


def _merge(first: Finding, other: Finding) -> Finding:
    """Merge two findings: the figures of the more expensive one, and the sum of their costs."""
    known = first.cost_seconds is not None and other.cost_seconds is not None
    larger = max(first, other, key=lambda found: found.bytes)
    places = dict.fromkeys((first.source, *first.elsewhere, other.source, *other.elsewhere))
    return replace(
        larger,
        bytes=first.bytes + other.bytes,
        cost_seconds=(first.cost_seconds or 0.0) + (other.cost_seconds or 0.0) if known else None,
        elsewhere=tuple(place for place in places if place and line_of(place) != larger.line),
    )
