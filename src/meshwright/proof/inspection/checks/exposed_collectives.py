"""Collectives that ops wait for although independent ops could run meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.description.hlo.module import Instruction
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.proof.simulate.events import COMPUTE
from meshwright.record import Kind, Phase
from meshwright.units import show_percent, show_seconds

_SHARE_OF_STEP = 0.02
"""The smallest exposed time reported, as a fraction of the step time."""

_LEAST_SECONDS = 1e-5
"""Shorter collectives are mostly latency: overlapping them would cost as much as it saves."""


@dataclass(frozen=True, kw_only=True)
class ExposedCollective(Finding):
    """A collective that ops wait for although independent ops could run.

    Per step: exposed_seconds is the wait, independent_seconds the time of the independent ops, step_seconds the whole.
    """

    kind = FindingKind.EXPOSED_COMMUNICATION
    merged_by = ("collective", "axes")
    is_merged_across_sources = True

    collective: Kind
    array: str
    axes: tuple[str, ...]
    phase: Phase
    exposed_seconds: float
    independent_seconds: float
    step_seconds: float

    def _sentences(self) -> tuple[str, str]:
        share = show_percent(self.exposed_seconds / self.step_seconds)
        return (
            f"ops wait {show_seconds(self.exposed_seconds)} a step ({share}) for the {self.collective} of"
            f" {self.array} over {joined(self.axes)} in {self.phase}, while {show_seconds(self.independent_seconds)} of"
            " other ops beside it do not depend on it",
            _OVERLAP.get(
                self.collective,
                "make it a reduce-scatter and an all-gather, which compilers run beside other ops, or cut it into"
                " pieces between which ops can run",
            ),
        )


def exposed_collectives(context: ProgramContext) -> Iterator[Finding]:
    """Yield collectives whose wait could be filled with independent ops of the same computation."""
    if context.schedule is None:
        return
    step = context.schedule.step_seconds
    ops: defaultdict[str, float] = defaultdict(float)
    for event in context.schedule.events:
        if event.lane == COMPUTE and event.kind != "loop":
            ops[event.name] += event.total_seconds
    for instruction, entries in context.communicating_instructions:
        exposed = context.exposed_seconds.get(instruction.name, 0.0)
        times = context.execution_counts.times[instruction.computation]
        largest = max(entries, key=lambda entry: entry.bytes)
        if largest.bytes < LEAST_BYTES * largest.count:
            continue
        if exposed < max(_SHARE_OF_STEP * step, _LEAST_SECONDS * times):
            continue
        # Ops of the same computation that neither feed it nor use its result.
        instructions = context.module.computations[instruction.computation].instructions
        tied = _reached(context, instruction, forward=True) | _reached(context, instruction, forward=False)
        free = sum(seconds for name, seconds in ops.items() if name in instructions and name not in tied)
        if min(exposed, free) >= max(_SHARE_OF_STEP * step, _LEAST_SECONDS * times):
            yield ExposedCollective(
                collective=largest.kind,
                array=largest.array,
                axes=largest.axes,
                phase=largest.phase,
                exposed_seconds=exposed,
                independent_seconds=free,
                step_seconds=step,
                bytes=largest.bytes,
                cost_seconds=min(exposed, free),
                source=largest.source,
            )


def _reached(context: ProgramContext, instruction: Instruction, *, forward: bool) -> set[str]:
    """Return the names of an instruction and of all that depend on it; if not `forward`, of all that it depends on."""
    waiting, seen = [instruction], {instruction.name}
    while waiting:
        one = waiting.pop()
        for other in context.module.users(one) if forward else context.module.operands(one):
            if other.name not in seen:
                seen.add(other.name)
                waiting.append(other)
    return seen


_OVERLAP = {
    "all-gather": (
        "start the gather earlier: take what it gathers out of the chain of ops before it (an optimization barrier, a"
        " loop over what could be gathered ahead), or overlap it with its product in a ring (collective matmul)"
    ),
    "reduce-scatter": (
        "let the next product begin before this sum is done: overlap both in a ring (collective matmul)"
    ),
    "collective-permute": (
        "send earlier: what it sends is ready before the op in front of it, which does not need it; in a ring, begin"
        " the next step's permute before this step's product"
    ),
    "all-to-all": "cut the array into pieces and exchange one while ops work on another",
}
