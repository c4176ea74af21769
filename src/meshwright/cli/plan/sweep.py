"""`meshwright plan --sweep`: the best mesh for each of several numbers of chips, batches or sequence lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.plan.screen import run_as
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import System
from meshwright.description.step.workload import Workload
from meshwright.pictures.charts import Bar, DeviceLimits, write_charts
from meshwright.pictures.tables import console, mesh_name, show, table
from meshwright.pictures.text import folded
from meshwright.planning.plan import Plan
from meshwright.planning.sweep import Point, Sweep, check_planned, run_sweep
from meshwright.planning.why.step import computed_mfu
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds


def plan_sweep(
    sweep: Sweep,
    workload: Workload,
    system: System,
    best: Callable[[Workload, System], Plan],
    *,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Print a row for each value of a sweep, and draw them if a file is named; return 1 if nothing fits.

    best: returns the best plan of a workload on a system.

    Raises if none of the values can be planned.
    """
    with waiting(f"planning {len(sweep.values)} values of {sweep.key}"):
        points = run_sweep(sweep, workload, system, best)
    check_planned(sweep, points)
    code = 0 if any(point.record and point.record.fits for point in points) else 1
    chips = system.chip.name if sweep.key == "chips" else system
    title = f"{_headline(workload, sweep=sweep.key)} · {chips}"
    if plot is not None:
        with waiting(f"drawing {plot}"):
            _plot(
                points, plot, DeviceLimits(system.peak(workload.compute_dtype), system.usable_bytes), title, sweep.key
            )
    if as_json:
        print(json.dumps({"sweep": sweep.key, "points": [_data(point) for point in points]}, indent=2))
        return code
    show(console(), title)
    print(f"sweep over {sweep.key}, the best plan for each\n")
    columns = (sweep.key, "hardware", "best mesh", "step", "MFU", "a device", "scaling", "memory", "bound by")
    # Simulated devices share the cores of one machine: neither a share of a peak nor scaling means anything there.
    left_out = {4, 6} if system.chip.kind == "cpu" else set[int]()
    priced = [point for point in points if point.record]
    first = next((point for point in priced if point.record and point.record.fits), priced[0])
    lines = [columns, *(_row(point, first) for point in points)]
    shown, *rows = [tuple(cell for at, cell in enumerate(line) if at not in left_out) for line in lines]
    show(console(), table(shown, rows, left=(1, 2, len(shown) - 1)))
    for point in points:
        if point.record is None:
            print(folded(f"{sweep.key}={point.value:,}: {point.reason}"))
    if plot is not None:
        print(f"\n wrote  {plot}")
    return code


def plot_plan(plans: Sequence[Plan], path: Path) -> None:
    """Draw the candidates of a plan side by side, each labelled with its strategy."""
    workload, system = plans[0].workload, plans[0].system
    bars = [Bar(f"{place}   {plan.mesh}\n{run_as(plan)}", plan.predicted) for place, plan in enumerate(plans, start=1)]
    limits = DeviceLimits(system.peak(workload.compute_dtype), system.usable_bytes)
    write_charts(bars, path, limits, title=f"{_headline(workload)} · {system}")


def _plot(points: Sequence[Point], path: Path, limits: DeviceLimits, title: str, key: str) -> None:
    """Write a chart of the points that could be planned to `path`. key: the swept option, the chart's x axis."""
    bars = [
        Bar(f"{point.value:,}\n{mesh_name(point.record)}", point.record, size=point.value)
        for point in points
        if point.record
    ]
    write_charts(bars, path, limits, title=f"{title} · sweep over {key}, the best plan for each", scale=key)


def _headline(workload: Workload, *, sweep: str = "") -> str:
    """Return the headline: settings that all points share, neither swept nor chosen by the planner."""
    batch = "batch" if sweep == "batch" else f"{workload.batch:,}"
    seq_len = "seq_len" if sweep == "seq_len" else f"{workload.seq_len:,}"
    return f"{workload.model.name} · {workload.task} · {batch} × {seq_len} tokens · {workload.compute_dtype}"


def _row(point: Point, first: Point) -> tuple[str, ...]:
    """Return a point's row. Its scaling is tokens per second per device, relative to `first`, the first that fits."""
    if point.plan is None:
        return (f"{point.value:,}", point.system, "-", "", "", "", "", "", "")
    record = point.plan.predicted
    rate, base = _device_rate(record), _device_rate(first.record or record)
    return (
        f"{point.value:,}",
        point.system,
        mesh_name(record),
        show_seconds(record.step_seconds or 0.0),
        show_percent(computed_mfu(point.plan) or 0.0),
        show_rate(rate, "tok/s"),
        show_percent(rate / base),
        show_bytes(record.memory_bytes["peak"]) + ("" if record.fits else " !"),
        record.bound or "",
    )


def _device_rate(record: Record) -> float:
    """Return tokens per second per device."""
    return (record.tokens_per_second or 0.0) / math.prod(record.mesh.values())


def _data(point: Point) -> dict[str, Any]:
    """Return a point as plain data."""
    record = point.record
    return {
        "value": point.value,
        "hardware": point.system,
        "record": record.to_json() if record else None,
        "reason": point.reason or None,
    }
