"""Ties: plans whose step times differ by less than the prediction's error, which are ranked by simplicity instead."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planning.plan import Plan

RATIO_ERROR = 0.0546
"""Median error of the predicted ratio of two step times, relative to the measured ratio, over pairs of published runs.

There are 157 pairs; the runs of a pair are on the same chips and in the same group (`benchmarks/published_runs.py`,
"ratios").
"""


def ties(plan: Plan, faster: Plan) -> bool:
    """Whether a plan's step is longer than a faster one's by no more than `RATIO_ERROR`."""
    return (plan.predicted.step_seconds or 0.0) <= (1 + RATIO_ERROR) * (faster.predicted.step_seconds or 0.0)


def simplest_first(plans: Sequence[Plan]) -> tuple[tuple[Plan, ...], int]:
    """Return (plans in a new order, number of plans that tie with the fastest).

    The plans that fit and tie with the fastest are first, the simplest of them first. The order of the others stays.
    plans: first those that fit, fastest first.
    """
    tied = [plan for plan in plans if plan.predicted.fits and ties(plan, plans[0])]
    others = plans[len(tied) :]
    tied.sort(key=_simplicity)
    return (*tied, *others), len(tied)


HABIT = {"fsdp": 0, "dp": 1, "tp": 2, "ep": 2, "pp": 3, "sp": 4}
"""Rank of each mesh axis: 0 for the one that training runs use most commonly."""

LONG_SEQUENCE = 32_768
"""Sequence length in tokens from which splitting over sp is common; for shorter sequences, sp counts twice."""


def _simplicity(plan: Plan) -> tuple[int, int, int, float]:
    """Return the sort key of tied plans: fewest features, least memory, most common axes, shortest step, in this order.

    Memory is in tenths of a device's usable memory.
    """
    tenths = round(10 * plan.predicted.memory_bytes["peak"] / plan.system.usable_bytes)
    habit = sum(HABIT[axis] for axis, degree in plan.mesh.degrees.items() if degree > 1)
    return num_parts(plan), tenths, habit, plan.predicted.step_seconds or 0.0


def num_parts(plan: Plan) -> int:
    """Return the number of features of a plan: mesh axes, pipeline, virtual stages, microbatches, collective matmuls.

    For sequences shorter than `LONG_SEQUENCE`, sp counts twice.
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
