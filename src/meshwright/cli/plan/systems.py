"""`meshwright plan --compare-systems`: the best plan on each of several systems, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.cli.plan.screen import candidate, run_as
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.evidence.runs import step_range
from meshwright.planning.plan import Plan
from meshwright.planning.why.step import computed_mfu
from meshwright.planning.why.training_run import TrainingRun
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds


def print_systems(plans: Sequence[Plan], runs: Sequence[TrainingRun | None]) -> None:
    """Print the plans as a table. runs: time and cost of training on each system, if requested."""
    workload = plans[0].workload
    tokens = f"{workload.sequences:,} × {workload.seq_len:,} tokens{workload.in_pairs}"
    show(console(), f"{workload.model.name} · {workload.task} · {tokens}, the best plan on each system")
    print()
    columns = [_column(plan, run) for plan, run in zip(plans, runs, strict=True)]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    rows = [(name, *(column[name] for column in columns)) for name in names]
    show(console(), table(("", *(plan.hardware for plan in plans)), rows))
    for plan in plans:
        if plan.planned_only:
            print(folded(f"{plan.hardware}: {plan.planned_only}"))


def _column(plan: Plan, run: TrainingRun | None) -> dict[str, str]:
    """Return a plan's figures as text, by name; '' if a figure is missing."""
    record, found, mfu = plan.predicted, step_range(plan), computed_mfu(plan)
    room = f"{show_bytes(record.memory_bytes['peak'])} of {show_bytes(plan.system.usable_bytes)}"
    return {
        "best mesh": str(plan.mesh),
        "run as": run_as(plan),
        "step": show_seconds(record.step_seconds or 0.0),
        "range": "" if found is None else f"{show_seconds(found.shortest)} to {show_seconds(found.longest)}",
        "MFU": "" if mfu is None else show_percent(mfu),
        "tokens a second": show_rate(record.tokens_per_second or 0.0, "tok/s"),
        "memory": room if record.fits else f"{room}, does not fit",
        "bound by": record.bound or "",
        "days": "" if run is None else f"{run.seconds / 86400:,.3g}",
        "chip hours": "" if run is None else f"{run.chip_hours:,.0f}",
        "cost": "" if run is None or run.cost is None else f"{run.cost:,.0f}",
    }


def systems_data(plans: Sequence[Plan], runs: Sequence[TrainingRun | None]) -> None:
    """Print the plans as JSON, in the order in which their systems were named."""
    found = []
    for plan, run in zip(plans, runs, strict=True):
        interval = step_range(plan)
        found.append(
            {
                "hardware": plan.hardware,
                "plan": candidate(plan, plan),
                "range": interval.to_json() if interval else None,
                "training_run": run.to_json() if run else None,
            }
        )
    print(json.dumps({"systems": found}, indent=2))
