"""`Inspection`, the result of inspecting a program: its collectives, memory and times (`Record`), and its findings."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.slices import across_slices, within_slice
from meshwright.description.hardware.system import System
from meshwright.description.hlo.module import Module, contradictions_as_errors
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import describe
from meshwright.description.hlo.records import read_module
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective_time import achieved_seconds
from meshwright.proof.compiler.program import CompiledProgram
from meshwright.proof.compiler.records import read_optimized
from meshwright.proof.inspection.baseline import NOTHING_ACCEPTED, Accepted, write_baseline
from meshwright.proof.inspection.context import ProgramContext, Rules
from meshwright.proof.inspection.finding import Finding
from meshwright.proof.inspection.run_checks import run_checks
from meshwright.proof.inspection.sarif import sarif_log
from meshwright.proof.simulate.buffers import Buffer, read_buffers
from meshwright.proof.simulate.perfetto import write_trace
from meshwright.proof.simulate.schedule import Schedule, simulate
from meshwright.record import MOST_SHOWN, Collective, Record
from meshwright.support.files import write_file
from meshwright.support.notebook import card
from meshwright.units import show_degrees, show_flops, show_seconds


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Result of an inspection, per device and step.

    record: collectives, memory and times in the form that plans have too; each collective with its source, and its time
    if the hardware is known. findings: those that count. ignored, in_baseline: findings that do not count because of
    `ignore` or `baseline`. flops_by_scope: the flops of matmuls by named scope. schedule: the simulated step; None for
    simulated devices and the TPU compiler's fast effort. program: None for HLO text alone.
    """

    name: str
    record: Record
    findings: tuple[Finding, ...]
    flops_by_scope: Mapping[str, int]
    module: Module
    program: CompiledProgram | None = None
    schedule: Schedule | None = None
    ignored: tuple[Finding, ...] = ()
    in_baseline: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        """The screen of `meshwright inspect`, as plain text."""
        from meshwright.pictures.screens.inspection import screen_text

        return screen_text(self)

    def html(self, file: str | Path | None = None, *, trace: str | Path | None = None) -> str:
        """Return the self-contained page of `meshwright inspect --html`; also write it to `file` if given.

        trace: a file written by the method `trace`, to which the page links.
        """
        from meshwright.pictures.pages import inspection_page

        page = inspection_page(self, None if trace is None else os.path.relpath(trace, Path(file or "page").parent))
        if file is not None:
            write_file(file, page)
        return page

    def trace(self, file: str | Path) -> None:
        """Write the simulated step as a trace for Perfetto (ui.perfetto.dev), gzipped where the name ends in .gz.

        Raises:
            MeshwrightError: no step was simulated.
        """
        if self.schedule is None:
            raise MeshwrightError(
                f"{self.name} has no simulated step to trace: it needs a schedule that a TPU's or a GPU's compiler made"
            )
        write_trace(self.schedule, file)

    def write_baseline(self, file: str | Path) -> None:
        """Write a file for the `baseline` argument of `inspect`: all findings but the ignored ones."""
        write_baseline((*self.findings, *self.in_baseline), file)

    def sarif(self, file: str | Path) -> None:
        """Write the findings that count as SARIF 2.1.0, from which code hosts annotate the lines of a change."""
        write_file(file, json.dumps(sarif_log(self.findings, self.name), indent=2) + "\n")

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers in a device's memory at the peak, largest first; () if the program has no schedule."""
        return () if self.module.attributes.get("is_scheduled") != "true" else read_buffers(self.module).live

    def __repr__(self) -> str:
        """One line: the program, its mesh, the bytes it communicates, and the number of findings."""
        mesh, kinds = show_degrees(self.record.mesh), ", ".join(finding.kind for finding in self.findings[:3])
        found = f"{self.summary}: {kinds}" if self.findings else self.summary
        return f"<Inspection of {self.name} on {mesh}: {len(self.collectives)} collectives, {found}>"

    def _repr_html_(self) -> str:
        """The inspection in a notebook: the findings, then collectives, memory and flops by scope."""
        record = self.record
        mesh = show_degrees(record.mesh)
        rows = [
            (found.kind, show_seconds(found.cost_seconds) if found.cost_seconds else "", found.evidence, found.fix)
            for found in self.findings[:MOST_SHOWN]
        ]
        scopes = [(scope or "(no scope)", show_flops(flops)) for scope, flops in self.flops_by_scope.items()]
        tables = (
            (("finding", "costs a step", "evidence", "fix"), rows),
            *record.tables(),
            (("flops by scope", ""), scopes[:MOST_SHOWN]),
        )
        return card(f"{self.name} · {mesh} · {record.hardware}", self.summary, tables, record.notes)

    @property
    def summary(self) -> str:
        """The number of findings, and of those that do not count: `2 findings (1 ignored, 3 in the baseline)`."""
        count = len(self.findings)
        found = f"{count} finding{'s' if count > 1 else ''}" if count else "no finding"
        others = [
            f"{len(those)} {where}"
            for where, those in (("ignored", self.ignored), ("in the baseline", self.in_baseline))
            if those
        ]
        return f"{found} ({', '.join(others)})" if others else found

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives, one entry for each instruction and phase."""
        return self.record.collectives

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of each memory term, and `peak`; empty for HLO text alone."""
        return self.record.memory_bytes

    @property
    def flops(self) -> float:
        """The flops of all matmuls, including recomputation."""
        return self.record.flops or 0.0

    def to_json(self) -> dict[str, Any]:
        """This inspection as plain data."""
        return {
            "name": self.name,
            "record": self.record.to_json(),
            "flops_by_scope": dict(self.flops_by_scope),
            "findings": [finding.to_json() for finding in self.findings],
            "ignored": [finding.to_json() for finding in self.ignored],
            "in_baseline": [finding.to_json() for finding in self.in_baseline],
        }


def read_inspection(
    name: str,
    hlo: str,
    mesh: Mapping[str, int],
    *,
    hardware: str,
    system: System | None,
    program: CompiledProgram | None = None,
    is_scheduled: bool = False,
    rules: Rules | None = None,
    expected: Sequence[Collective] | None = None,
    state: Sequence[str] | None = None,
    accepted: Accepted = NOTHING_ACCEPTED,
) -> Inspection:
    """Inspect a compiled program given as HLO text.

    Args:
        name: shown to the user.
        hlo: the optimized module.
        mesh: every axis and its degree, outermost first.
        hardware: its name, for the record.
        system: for times; None if unknown.
        program: the compiled program of the text; None for HLO text alone.
        is_scheduled: whether the schedule in `hlo` is final, so that a simulated step is meaningful.
        rules: see `ProgramContext`.
        expected: see `ProgramContext`.
        state: see `ProgramContext`.
        accepted: findings that do not count.
    """
    module = read_optimized(program) if program else parse_hlo(hlo)
    within = within_slice(mesh, system.num_slices) if system else dict(mesh)
    across = across_slices(mesh, system.num_slices) if system and system.num_slices > 1 else None
    record = read_module(module, within, hardware=hardware, across=across)
    schedule = simulate(module, mesh, system) if system and is_scheduled else None
    context = ProgramContext(
        module=module,
        mesh=within,
        system=replace(system, num_slices=1) if system else None,
        program=program,
        schedule=schedule,
        rules=rules or {},
        expected=None if expected is None else tuple(expected),
        state=None if state is None else tuple(state),
    )
    between = _timed_between_slices(record, context, mesh, system) if across else ()
    context = replace(context, between_slices=between)
    context.check_state()
    with contradictions_as_errors(module):
        found, notes = run_checks(context)
        findings, ignored, in_baseline = accepted.split(found)
        record = _with_times(_with_memory(record, mesh, system, program), context)
        # An einsum's formula is not a scope.
        flops: Counter[str] = Counter()
        for work in context.products:
            *scopes, _ = ("", *describe(context.module, work.instruction)[0].scope.split("/"))
            flops["/".join(scope for scope in scopes if scope and "->" not in scope)] += work.flops
        return Inspection(
            name=name,
            record=replace(record, notes=(*record.notes, *notes)),
            findings=findings,
            flops_by_scope=dict(flops.most_common()),
            module=module,
            program=program,
            schedule=schedule,
            ignored=ignored,
            in_baseline=in_baseline,
        )


def _with_memory(
    record: Record, mesh: Mapping[str, int], system: System | None, program: CompiledProgram | None
) -> Record:
    """Return the record with `mesh`, the mesh over all slices, and with the program's memory and notes."""
    if program is None:
        return replace(record, mesh=dict(mesh))
    is_limited = system is not None and system.chip.kind != "cpu"
    fits = program.memory_bytes["peak"] <= system.usable_bytes if system and is_limited else None
    notes = (*program.notes, *record.notes)
    return replace(record, mesh=dict(mesh), memory_bytes=dict(program.memory_bytes), fits=fits, notes=notes)


def _with_times(record: Record, context: ProgramContext) -> Record:
    """Return the record with times of collectives, and exposed times if there is a schedule.

    The time of a collective between slices is known if its axes do not also run within slices; its exposed time never
    is.
    """
    timed = []
    for instruction, entries in context.communicating_instructions:
        whole = sum(entry.bytes for entry in entries)
        for entry in entries:
            seconds, exposed = context.seconds_of(entry), None
            if context.schedule is not None:
                share = entry.bytes / whole if whole else 1.0
                exposed = share * context.exposed_seconds.get(instruction.name, 0.0)
            timed.append(replace(entry, seconds=seconds, exposed_seconds=exposed))
    timed += context.between_slices
    if context.schedule is None:
        return replace(record, collectives=tuple(timed))
    return replace(
        record,
        collectives=tuple(timed),
        step_seconds=context.schedule.step_seconds,
        breakdown_seconds=dict(context.schedule.breakdown_seconds),
        notes=tuple(dict.fromkeys((*record.notes, *context.schedule.notes))),
    )


def _timed_between_slices(
    record: Record, context: ProgramContext, mesh: Mapping[str, int], system: System | None
) -> tuple[Collective, ...]:
    """Return the collectives between slices, with times if their axes do not also run within slices."""
    inside = sum(len(entries) for _, entries in context.communicating_instructions)
    timed = []
    for move in record.collectives[inside:]:
        is_whole = system is not None and all(context.mesh[axis] == 1 for axis in move.axes)
        layout = lay_mesh(system, mesh) if system is not None and is_whole else None
        seconds = (
            move.count * achieved_seconds(move.kind, move.bytes / move.count, layout, move.axes) if layout else None
        )
        timed.append(replace(move, seconds=seconds))
    return tuple(timed)
