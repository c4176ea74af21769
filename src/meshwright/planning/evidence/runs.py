"""Published runs with measured and predicted step times; their errors give a range for a plan's step time."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.description.frameworks.framework import OURS, load_framework
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.planning.plan import Plan
from meshwright.units import show_count, show_percent, show_seconds

FILE = Path(__file__).parent / "published.json"

LEAST_RUNS = 8
"""The smallest number of similar runs from which a range is computed."""

SHARE = 0.8
"""Fraction of the similar runs whose errors the range covers. Each source of runs has the same total weight."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published training run. kind: `gpu` or `tpu`. parameters: the model's parameter count, all experts included."""

    name: str
    source: str
    framework: str
    chip: str
    kind: str
    model: str
    parameters: float
    has_experts: bool
    num_devices: int
    mesh: str
    seq_len: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """The relative error of the predicted step time: predicted / measured - 1, positive if predicted too long."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class StepRange:
    """The range of a plan's step time if its prediction has an error like those of similar published runs.

    shortest, longest: seconds. like: the properties that these runs share with the plan, in words.
    """

    shortest: float
    longest: float
    num_runs: int
    like: str

    def __str__(self) -> str:
        """Return the range and the runs behind it, as one line of text."""
        return (
            f"{show_seconds(self.shortest)} to {show_seconds(self.longest)} a step, by"
            f" {show_count(self.num_runs, 'published run')} {self.like} (--evidence)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {
            "step_seconds": [self.shortest, self.longest],
            "share_of_runs": SHARE,
            "num_runs": self.num_runs,
            "runs": self.like,
        }


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return the stored runs."""
    return tuple(PublishedRun(**data) for data in json.loads(FILE.read_text()))


def step_range(plan: Plan) -> StepRange | None:
    """Return the range of a plan's step time; None if fewer than `LEAST_RUNS` runs are similar to it."""
    step = plan.predicted.step_seconds
    for like, runs in _groups(plan):
        if step and len(runs) >= LEAST_RUNS:
            low, high = _quantile(runs, (1 - SHARE) / 2), _quantile(runs, (1 + SHARE) / 2)
            return StepRange(step / (1 + high), step / (1 + low), len(runs), like)
    return None


def nearest_runs(plan: Plan, count: int) -> tuple[PublishedRun, ...]:
    """Return the `count` published runs most similar to a plan, most similar first.

    Compared are chip, framework, experts, model size, devices and sequence length.
    """
    system, parameters = plan.system, num_parameters(plan.workload.model)
    alike = [run for run in published_runs() if run.kind == system.chip.kind]

    def distance(run: PublishedRun) -> float:
        return (
            2.0 * (run.chip != system.chip.name)
            + 2.0 * (run.framework not in _frameworks(plan))
            + 2.0 * (run.has_experts != _has_experts(plan))
            + abs(math.log2(run.parameters / parameters)) / 2
            + abs(math.log2(run.num_devices / system.num_devices)) / 4
            + abs(math.log2(run.seq_len / plan.workload.seq_len)) / 4
        )

    return tuple(sorted(alike, key=distance)[:count])


def evidence_rows(runs: Sequence[PublishedRun]) -> list[tuple[str, ...]]:
    """Return a row of text for each run, with the columns `EVIDENCE_COLUMNS`."""
    return [
        (
            run.name,
            f"{run.chip}:{run.num_devices}",
            run.mesh,
            show_seconds(run.measured_seconds),
            show_seconds(run.predicted_seconds),
            f"{'+' if run.error >= 0 else '-'}{show_percent(abs(run.error))}",
        )
        for run in runs
    ]


EVIDENCE_COLUMNS = ("published run", "chips", "mesh", "measured", "predicted", "error")


def _groups(plan: Plan) -> Iterator[tuple[str, list[PublishedRun]]]:
    """Yield (properties that runs share with a plan, in words; these runs) for groups of runs, most similar first."""
    chip, names, has_experts = plan.system.chip, _frameworks(plan), _has_experts(plan)
    framework = plan.strategy.profile.name or "JAX"
    of = "of MoE models" if has_experts else "of dense models"
    runs = [run for run in published_runs() if run.kind == chip.kind and run.has_experts == has_experts]
    theirs = [run for run in runs if run.framework in names]
    kind = {"gpu": "GPUs", "tpu": "TPUs"}.get(chip.kind, "")
    yield f"{of} with {framework} on {chip.name}", [run for run in theirs if run.chip == chip.name]
    yield f"{of} with {framework} on {kind}", theirs
    yield f"{of} on {kind}", runs


def _frameworks(plan: Plan) -> frozenset[str]:
    """Return the names of frameworks whose runs resemble the plan's: its own, or for meshwright all JAX frameworks."""
    name = plan.strategy.profile.name
    if name:
        return frozenset({name})
    known = {run.framework for run in published_runs()}
    return frozenset({other for other in known if load_framework(other).is_jax} | {OURS})


def _has_experts(plan: Plan) -> bool:
    return getattr(plan.workload.model, "experts", None) is not None


def _quantile(runs: Sequence[PublishedRun], share: float) -> float:
    """Return the quantile `share` of the runs' errors. Each source has the same total weight."""
    counts = Counter(run.source for run in runs)
    total = 0.0
    for run in sorted(runs, key=lambda run: run.error):
        total += 1 / counts[run.source] / len(counts)
        if total >= share:
            return run.error
    return max(run.error for run in runs)
