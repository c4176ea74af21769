"""Why a plan is not the best: its largest difference from the best plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from meshwright.planning.plan import Plan
from meshwright.planning.ties import num_parts, ties
from meshwright.planning.why.fact import Fact
from meshwright.record import Record
from meshwright.units import show_bytes, show_count, show_seconds

Name = TypeVar("Name", str, tuple[str, ...])


class GapKind(StrEnum):
    """Why a plan is not the best."""

    BEST = "best"
    MEMORY = "does not fit"
    EQUAL = "as fast, with less memory left"
    TIED = "tied"
    FASTER = "faster"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    TERM = "term"


@dataclass(frozen=True)
class Gap(Fact):
    """The largest difference between a plan and the best plan.

    The best plan is the first of a ranking, which puts the simplest of tied plans first; so another may be faster.
    """

    kind: GapKind
    term: str = ""
    """Name of the term of the step that exceeds the best plan's most."""
    seconds: float = 0.0
    """By how much that term exceeds the best plan's; for TIED and FASTER, by how much this plan's step is shorter."""
    axes: tuple[str, ...] = ()
    """For COMMUNICATION: the mesh axes whose exposed communication exceeds the best plan's most."""
    remat: str = ""
    """For RECOMPUTE: the plan's remat policy."""
    peak_bytes: int = 0
    """For MEMORY: the plan's peak memory on one device."""
    parts: int = 0
    """For TIED: how many more features the plan has than the best (`planning.ties.num_parts`)."""

    def __str__(self) -> str:
        match self.kind:
            case GapKind.BEST:
                return "-"
            case GapKind.MEMORY:
                return f"needs {show_bytes(self.peak_bytes)}"
            case GapKind.TIED:
                more = f", {show_count(self.parts, 'more setting')}" if self.parts > 0 else ""
                return f"a tie: {show_seconds(self.seconds)} faster{more}"
            case GapKind.FASTER:
                return f"faster by {show_seconds(self.seconds)}"
            case GapKind.RECOMPUTE:
                return f"needs remat {self.remat}: +{show_seconds(self.seconds)}"
            case GapKind.COMMUNICATION:
                return f"{'*'.join(self.axes)} communication: +{show_seconds(self.seconds)}"
            case GapKind.TERM:
                return f"{self.term} +{show_seconds(self.seconds)}"
            case GapKind.EQUAL:
                return str(self.kind)


def gap_to(plan: Plan, best: Plan) -> Gap:
    """Return the largest difference between a plan and the best plan."""
    record = plan.predicted
    if not record.fits:
        return Gap(GapKind.MEMORY, peak_bytes=record.memory_bytes["peak"])
    if plan == best:
        return Gap(GapKind.BEST)
    slowest, seconds = largest_excess(record.breakdown_seconds, best.predicted.breakdown_seconds)
    if (saved := (best.predicted.step_seconds or 0.0) - (record.step_seconds or 0.0)) > 0:
        kind = GapKind.TIED if ties(best, plan) else GapKind.FASTER
        return Gap(kind, seconds=saved, parts=num_parts(plan) - num_parts(best))
    if seconds <= 0:
        return Gap(GapKind.EQUAL)
    if slowest == "recompute" and plan.workload.remat != best.workload.remat:
        return Gap(GapKind.RECOMPUTE, slowest, seconds, remat=plan.workload.remat)
    if slowest == "exposed communication":
        axes, _ = largest_excess(dict(_exposed_by_axes(record)), dict(_exposed_by_axes(best.predicted)))
        return Gap(GapKind.COMMUNICATION, slowest, seconds, axes=axes)
    return Gap(GapKind.TERM, slowest, seconds)


def largest_excess(times: Mapping[Name, float], least: Mapping[Name, float]) -> tuple[Name, float]:
    """Return (the key for which `times` exceeds `least` most, by how much); keys missing in `least` count as 0."""
    gaps = {name: time - least.get(name, 0.0) for name, time in times.items()}
    name = max(gaps, key=gaps.__getitem__)
    return name, gaps[name]


def dearest_axes(record: Record) -> tuple[str, ...]:
    """Return the axes with the longest exposed communication."""
    times = dict(_exposed_by_axes(record))
    return max(times, key=times.__getitem__)


def _exposed_by_axes(record: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (set of mesh axes, seconds of exposed communication over them) of a step, without a reference model's."""
    moves = record.own_collectives
    for axes in {move.axes for move in moves}:
        yield axes, sum(move.exposed_seconds or 0.0 for move in moves if move.axes == axes)
