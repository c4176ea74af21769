"""Collectives that ops wait for, though other ops do not depend on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from meshwright.hlo import Instruction
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject
from meshwright.record import Collective
from meshwright.simulate import COMPUTE
from meshwright.units import show_percent, show_seconds

_SHARE_OF_STEP = 0.02
"""The part of a step below which waiting is left alone."""

_LEAST_SECONDS = 1e-5
"""A collective of less than this is hops and starts: to send it beside ops would cost as much as it saves."""

_FIXES = {
    "all-gather": "start the gather earlier: take what it gathers out of the chain of ops before it (an optimization"
    " barrier, a loop over what could be gathered ahead), or overlap it with its product in a ring (collective matmul)",
    "reduce-scatter": "let the next product begin before this sum is done: overlap both in a ring (collective matmul)",
    "collective-permute": "send earlier: what it sends is ready before the op in front of it, which needs it not; in"
    " a ring, begin the next step's permute before this step's product",
    "all-to-all": "cut the array into pieces and exchange one while ops work on another",
}
_FIX = (
    "make it a reduce-scatter and an all-gather, which compilers run beside other ops, or cut it into pieces between"
    " which ops can run"
)


def exposed_communication(subject: Subject) -> Iterator[Finding]:
    """Collectives whose wait the independent ops of the same computation could fill."""
    if subject.schedule is None:
        return
    step = subject.schedule.step_seconds
    ops: defaultdict[str, float] = defaultdict(float)
    for event in subject.schedule.events:
        if event.lane == COMPUTE and event.kind != "loop":
            ops[event.name] += event.total_seconds
    for instruction, entries in subject.communicating:
        exposed = subject.exposed_seconds.get(instruction.name, 0.0)
        times = subject.runs.times[instruction.computation]
        if exposed < max(_SHARE_OF_STEP * step, _LEAST_SECONDS * times):
            continue
        free = _independent_seconds(subject, instruction, ops)
        if min(exposed, free) >= _SHARE_OF_STEP * step:
            yield _finding(max(entries, key=lambda entry: entry.bytes), exposed, free, step)


def _finding(one: Collective, exposed: float, free: float, step: float) -> Finding:
    """What it costs that ops wait for a collective."""
    return Finding(
        kind="exposed communication",
        evidence=f"ops wait {show_seconds(exposed)} a step ({show_percent(exposed / step)}) for the {one.kind} of"
        f" {one.array} over {'*'.join(one.axes)} in {one.phase}, while {show_seconds(free)} of other ops beside it do"
        " not depend on it",
        bytes=one.bytes,
        seconds=min(exposed, free),
        source=one.source,
        fix=_FIXES.get(one.kind, _FIX),
    )


def _independent_seconds(subject: Subject, instruction: Instruction, ops: Mapping[str, float]) -> float:
    """The time a step of the ops beside a collective that neither make what it sends nor take its result."""
    instructions = subject.module.computations[instruction.computation].instructions
    tied = _reached(subject, instruction, forward=True) | _reached(subject, instruction, forward=False)
    return sum(seconds for name, seconds in ops.items() if name in instructions and name not in tied)


def _reached(subject: Subject, instruction: Instruction, *, forward: bool) -> set[str]:
    """The names of all that depends on an instruction in its computation, or of all that it depends on."""
    waiting, seen = [instruction], {instruction.name}
    while waiting:
        one = waiting.pop()
        for other in subject.module.users(one) if forward else subject.module.operands(one):
            if other.name not in seen:
                seen.add(other.name)
                waiting.append(other)
    return seen
