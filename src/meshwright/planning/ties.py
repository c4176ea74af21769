"""Ties: plans whose step times differ by less than the prediction's error, and the simplest of them."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planning.plan import Plan

RATIO_ERROR = 0.0546
"""Median error of the predicted ratio of two step times against the measured ratio, over pairs of published runs.

The 157 pairs are of runs in the same rank group on the same chips (`benchmarks/published_runs.py`, "ratios").
"""


def ties(plan: Plan, faster: Plan) -> bool:
    """Whether a plan's step is longer than a faster one's by no more than `RATIO_ERROR`."""
    return (plan.predicted.step_seconds or 0.0) <= (1 + RATIO_ERROR) * (faster.predicted.step_seconds or 0.0)


def simplest_first(plans: Sequence[Plan]) -> tuple[tuple[Plan, ...], int]:
    """Sort the plans that fit and tie with the fastest to the front, simplest first; also return how many tie.

    plans: those that fit, fastest first, then the others.
    """
    tied = [plan for plan in plans if plan.predicted.fits and ties(plan, plans[0])]
    others = plans[len(tied) :]
    tied.sort(key=_simplicity)
    return (*tied, *others), len(tied)


HABIT = {"fsdp": 0, "dp": 1, "tp": 2, "ep": 2, "pp": 3, "sp": 4}
"""Rank of each mesh axis by how commonly training runs use it."""

LONG_SEQUENCE = 32_768
"""Sequence length in tokens from which splitting over sp is common; for shorter ones, sp counts as two features."""


def _simplicity(plan: Plan) -> tuple[int, int, int, float]:
    """Return the sort key of tied plans: fewest features, then least memory in tenths, then common axes, then speed."""
    tenths = round(10 * plan.predicted.memory_bytes["peak"] / plan.system.usable_bytes)
    habit = sum(HABIT[axis] for axis, degree in plan.mesh.degrees.items() if degree > 1)
    return num_parts(plan), tenths, habit, plan.predicted.step_seconds or 0.0


def num_parts(plan: Plan) -> int:
    """Count the features of a plan: mesh axes, pipeline, virtual stages, microbatches, collective matmuls.

    sp on sequences that are not long counts twice.
    """
    strategy = plan.strategy
    return (
        sum(degree > 1 for degree in plan.mesh.degrees.values())
        + (plan.mesh.sp > 1 and plan.workload.seq_len < LONG_SEQUENCE)
        + (plan.mesh.pp > 1)
        + (strategy.virtual_stages > 1)
        + (strategy.num_microbatches > 1)
        + strategy.collective_matmul
    )
