"""Compare the collectives of a profile with those of the plan and the compiled step, by kind, axes and phase."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.execution.training.watch.profile import Profile
from meshwright.proof.verification.comparison import in_plans_terms
from meshwright.record import Collective, Record, merge


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """The collectives of one kind, over some axes, in a phase; None where the plan, program or trace lacks them."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    planned: Collective | None
    compiled: Collective | None
    measured: Collective | None


def compare_profile(planned: Record, profile: Profile) -> tuple[ProfileRow, ...]:
    """Return a row for each kind, axes and phase of collective in a plan, the compiled step or the trace of a run."""
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
