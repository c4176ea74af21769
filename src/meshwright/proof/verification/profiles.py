"""Compare the collectives of a profile with those of the plan and the compiled step, and with the links' bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.description.hardware.fabric import MeshPlacement
from meshwright.execution.training.watch.profile import Profile
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.proof.verification.comparison import in_plans_terms
from meshwright.record import Collective, Record, merge, wire_bytes


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """All collectives of one kind, over the same axes, in one phase, added up.

    planned, compiled, measured: their sum in the plan, in the compiled step and in the trace of the run; None if there
    are none.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    planned: Collective | None
    compiled: Collective | None
    measured: Collective | None


def compare_profile(planned: Record, profile: Profile) -> tuple[ProfileRow, ...]:
    """Return a row for each combination of kind, axes and phase in a plan, the compiled step or the trace of a run."""
    sides = [
        {(move.kind, move.axes, move.phase): move for move in merge(record.collectives)}
        for record in (planned, in_plans_terms(profile.compiled), in_plans_terms(profile.measured))
    ]
    return tuple(
        ProfileRow(
            kind=key[0],
            axes=key[1],
            phase=key[2],
            planned=sides[0].get(key),
            compiled=sides[1].get(key),
            measured=sides[2].get(key),
        )
        for key in dict.fromkeys(key for side in sides for key in side)
    )


@dataclass(frozen=True, kw_only=True)
class AxisBandwidth:
    """The bytes that a device sends in the collectives over some mesh axes, and the rates, in bytes per second.

    Args:
        axes: the mesh axes.
        links: the links that these axes are placed on.
        sent_bytes: bytes that a device sends per step, in a ring algorithm.
        measured: `sent_bytes` divided by the traced time of these collectives. On TPUs that is the time in which the
            device waits for them, so the rate of collectives that overlap with compute exceeds that of the links.
        predicted: the rate in the plan; None if the plan has no such collectives.
        links_rate: the rate with links at full bandwidth; None for simulated devices.
    """

    axes: tuple[str, ...]
    links: str
    sent_bytes: float
    measured: float
    predicted: float | None
    links_rate: float | None


def axis_bandwidths(planned: Record, profile: Profile, placed: MeshPlacement) -> tuple[AxisBandwidth, ...]:
    """Return the achieved bandwidth of the collectives over each combination of mesh axes, largest volume first.

    planned: the record of the plan. placed: the run's mesh on its hardware.
    """
    measured = [move for move in in_plans_terms(profile.measured).collectives if move.seconds]
    is_simulated = placed.system.chip.kind == "cpu"
    found = []
    for axes in dict.fromkeys(move.axes for move in measured if move.axes):
        placement = placed.placement(axes)
        moves = [move for move in measured if move.axes == axes]
        sent = sum(wire_bytes(move.kind, move.bytes, placement.degree) for move in moves)
        ideal = sum(
            move.count * collective_seconds(move.kind, move.bytes / move.count, placement).seconds for move in moves
        )
        found.append(
            AxisBandwidth(
                axes=axes,
                links=str(placement),
                sent_bytes=sent,
                measured=sent / _seconds(moves),
                predicted=_rate([move for move in planned.own_collectives if move.axes == axes], placement.degree),
                links_rate=None if is_simulated else sent / ideal,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.sent_bytes))


def _rate(moves: Sequence[Collective], degree: int) -> float | None:
    """Return the bytes that a device sends per second in planned collectives; None if there are none."""
    seconds = _seconds(moves)
    return sum(wire_bytes(move.kind, move.bytes, degree) for move in moves) / seconds if seconds else None


def _seconds(moves: Sequence[Collective]) -> float:
    return sum(move.seconds or 0.0 for move in moves)
