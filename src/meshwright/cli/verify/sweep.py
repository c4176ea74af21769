"""`meshwright verify --sweep`: the step for several numbers of chips, batches or lengths, predicted | compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.options.values import read_system
from meshwright.pictures.screens.verification import verification_data
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.library import plan_to_run
from meshwright.planning.plan import Plan
from meshwright.planning.sweep import Sweep, swept_options
from meshwright.record import Record
from meshwright.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.compiler.targets import Effort
    from meshwright.proof.verification.plans import Verification


class SweptStep(NamedTuple):
    """One value of a sweep with its plan, or with the reason why there is none."""

    value: int
    plan: Plan | None
    reason: str = ""


def verify_sweep(
    model: str, sweep: Sweep, options: Mapping[str, Any], *, effort: Effort, as_json: bool
) -> tuple[Verification, ...]:
    """Compile the step of every value of a sweep, and print a row for each; return the verifications.

    Raises:
        MeshwrightError: none of the values can be planned.
    """
    steps = [_step(model, sweep, value, options) for value in sweep.values]
    if not any(step.plan for step in steps):
        raise MeshwrightError(f"no value of --sweep can be planned; {sweep.key}={steps[0].value}: {steps[0].reason}")
    with waiting("loading JAX"):
        from meshwright.proof.verification.plans import verify_plan

    found: dict[int, Verification] = {}
    for value, plan, _ in steps:
        if plan is not None:
            with waiting(f"compiling {plan.workload.model.name} on {plan.mesh} for {plan.hardware}"):
                found[value] = verify_plan(plan, effort=effort if plan.system.chip.kind == "tpu" else "fast")
    if as_json:
        points = [
            {"value": value, "reason": reason or None}
            | ({} if plan is None else {"hardware": plan.hardware} | verification_data(found[value]))
            for value, plan, reason in steps
        ]
        print(json.dumps({"sweep": sweep.key, "points": points}, indent=2))
        return tuple(found.values())
    workload = next(step.plan for step in steps if step.plan).workload
    print(f"{workload.model.name} · train · predicted | compiled for each value of {sweep.key}\n")
    columns = (sweep.key, "hardware", "mesh", "step", "collectives of a device", "memory", "equal")
    rows = [_row(value, found[value]) if plan else (f"{value:,}", "-", *[""] * 5) for value, plan, _ in steps]
    show(console(), table(columns, rows, left=(1, 2)))
    for value, plan, reason in steps:
        if plan is None:
            print(folded(f"{sweep.key}={value:,}: {reason}"))
    return tuple(found.values())


def _step(model: str, sweep: Sweep, value: int, options: Mapping[str, Any]) -> SweptStep:
    """Return the plan of one value."""
    try:
        if sweep.key == "chips":
            system = read_system(options["on"], options.get("hardware"), options.get("memory_headroom"))
            changed = {**options, "on": system.resized(value), "hardware": None, "memory_headroom": None}
        else:
            changed = swept_options(sweep, options) | {sweep.key: value}
        return SweptStep(value, plan_to_run(model, changed))
    except MeshwrightError as error:
        return SweptStep(value, None, str(error))


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
