"""`meshwright verify --sweep`: the step for several numbers of chips, batches or lengths, predicted | compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import System
from meshwright.description.step.workload import Workload
from meshwright.pictures.screens.verification import verification_data
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.library import plan_to_run
from meshwright.planning.options import read_workload
from meshwright.planning.plan import Plan
from meshwright.planning.sweep import Sweep, check_planned, run_sweep, swept_options
from meshwright.record import Record
from meshwright.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.compiler.targets import Effort
    from meshwright.proof.verification.plans import Verification


def verify_sweep(
    model: str, sweep: Sweep, options: Mapping[str, Any], others: Mapping[str, Any], *, effort: Effort, as_json: bool
) -> tuple[Verification, ...]:
    """Compile the step of every value of a sweep, and print a row for each; return the verifications.

    options: the workload's options. others: the mesh and the options of the strategy. Raises if none of the values can
    be planned.
    """
    workload_options = swept_options(sweep, options)

    def plan(workload: Workload, system: System) -> Plan:
        own = {"on": system, "batch": workload.batch, "seq_len": workload.seq_len}
        replaced = dict.fromkeys(("hardware", "memory_headroom", "batch_tokens"))
        return plan_to_run(model, {**workload_options, **others, **replaced, **own})

    points = run_sweep(sweep, *read_workload(model, workload_options), plan)
    check_planned(sweep, points)
    with waiting("loading JAX"):
        from meshwright.proof.verification.plans import verify_plan

    found: dict[int, Verification] = {}
    for point in points:
        if (planned := point.plan) is not None:
            with waiting(f"compiling {planned.workload.model.name} on {planned.mesh} for {planned.hardware}"):
                own = effort if planned.system.chip.kind == "tpu" else "fast"
                found[point.value] = verify_plan(planned, effort=own)
    if as_json:
        data = [
            {"value": point.value, "reason": point.reason or None}
            | ({} if point.plan is None else {"hardware": point.system} | verification_data(found[point.value]))
            for point in points
        ]
        print(json.dumps({"sweep": sweep.key, "points": data}, indent=2))
        return tuple(found.values())
    name = next(iter(found.values())).plan.workload.model.name
    print(f"{name} · train · predicted | compiled for each value of {sweep.key}\n")
    columns = (sweep.key, "hardware", "mesh", "step", "collectives of a device", "memory", "equal")
    rows = [
        _row(point.value, found[point.value]) if point.plan else (f"{point.value:,}", "-", *[""] * 5)
        for point in points
    ]
    show(console(), table(columns, rows, left=(1, 2)))
    for point in points:
        if point.plan is None:
            print(folded(f"{sweep.key}={point.value:,}: {point.reason}"))
    return tuple(found.values())


def _row(value: int, found: Verification) -> tuple[str, ...]:
    predicted, compiled = found.plan.predicted, found.compiled
    equal = sum(row.is_equal for row in found.rows)
    seconds = [record.step_seconds for record in (predicted, compiled)]
    return (
        f"{value:,}",
        found.plan.hardware,
        str(found.plan.mesh),
        " | ".join("-" if each is None else show_seconds(each) for each in seconds),
        f"{show_bytes(_moved(predicted))} | {show_bytes(_moved(compiled))}",
        " | ".join(show_bytes(record.memory_bytes["peak"]) for record in (predicted, compiled)),
        f"{equal} of {len(found.rows)}",
    )


def _moved(record: Record) -> int:
    """Return the bytes of the arrays in a step's collectives, on one device."""
    return sum(move.bytes for move in record.own_collectives)
