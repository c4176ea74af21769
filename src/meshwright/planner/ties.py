"""Which of the best plans a prediction cannot tell apart, and the simplest of those."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.plan import Plan

RATIO_ERROR = 0.0546
"""How far the predicted ratio of two step times is from the measured one: the median over pairs of published runs.

The 157 pairs of one rank group on the same chips (`benchmarks/published_runs.py`, "ratios").
"""


def simplest_first(plans: Sequence[Plan]) -> tuple[tuple[Plan, ...], int]:
    """The plans with the simplest of those first that tie with the fastest, and how many tie.

    A plan ties where it fits and its step is longer by no more than `RATIO_ERROR`. plans: fastest first.
    """
    longest = (1 + RATIO_ERROR) * (plans[0].predicted.step_seconds or 0.0)
    fits = plans[0].predicted.fits
    tied = [plan for plan in plans if fits and plan.predicted.fits and (plan.predicted.step_seconds or 0.0) <= longest]
    tied.sort(key=lambda plan: (num_parts(plan), plan.predicted.step_seconds))
    return (*tied, *(plan for plan in plans if plan not in tied)), len(tied)


def num_parts(plan: Plan) -> int:
    """What there is to get right in a plan: mesh axes in use, a pipeline, its virtual stages, microbatches, rings."""
    strategy = plan.strategy
    return (
        sum(degree > 1 for degree in plan.mesh.degrees.values())
        + (plan.mesh.pp > 1)
        + (strategy.virtual_stages > 1)
        + (strategy.num_microbatches > 1)
        + strategy.collective_matmul
    )
