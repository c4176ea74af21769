"""Padding, copies of kv heads and uneven stages are planned as TPU compilers make them, on two targets.

`make test` compares plans with stored programs; `make matrix` compiles some again, `make exhaustive` all.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from records import TPU, read
from tpu_rows import CASES, compiled

from meshwright.planning.cost.arguments import argument_bytes
from meshwright.proof.verification.comparison import compare, quantity_of
from meshwright.proof.verification.differences import Difference
from meshwright.proof.verification.plans import static_overhead
from meshwright.record import record_from_json

STORED = read(TPU)

WORST_PEAK = 0.1270
"""The largest error of a peak among the programs of `benchmarks/memory.py`."""

AGAIN = ("odd fsdp=2,tp=4 v5p:2x2x2", "few fsdp=2,tp=4 v5p:2x2x2")
"""The quickest to compile, which `make matrix` does."""


def planned_otherwise(name, program):
    """Every quantity of a case whose plan and program differ without a cause, and each collective run more often."""
    row, target = CASES[name]
    plan = row.plan(target)
    kind = plan.system.chip.kind
    arguments = argument_bytes(plan.workload, plan.mesh, plan.strategy, kind=kind)
    rows = compare(plan.predicted, program, argument_bytes=arguments, overhead=static_overhead(plan))
    found = [each.quantity for each in rows if not each.is_explained]
    counts = {quantity_of(move.kind, move.axes, move.phase): move.count for move in plan.predicted.collectives}
    # The compiler combines collectives; branches that few ticks take stand in a program as if all did.
    known = {Difference.UNTAKEN_BRANCHES, Difference.OTHER_PHASE}
    often = {quantity_of(move.kind, move.axes, move.phase): move.count for move in program.collectives}
    for each in rows:
        count, most = often.get(each.quantity), counts.get(each.quantity)
        if count and most and count > most and not known & {cause.difference for cause in each.causes}:
            found.append(f"{each.quantity}: {most} planned, {count} compiled")
    peak = plan.predicted.memory_bytes["peak"]
    if abs(peak / program.memory_bytes["peak"] - 1) > WORST_PEAK:
        found.append(f"memory peak: {peak:,} planned, {program.memory_bytes['peak']:,} compiled")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_planned_as_a_tpu_compiler_made_it(name):
    program = record_from_json(STORED[name])
    assert planned_otherwise(name, program) == []
    # Each is seen: a byte more, no collective, a flop more, half of the memory more.
    move = next(move for move in program.collectives if move.kind == "all-gather")
    others = tuple(each for each in program.collectives if each is not move)
    peak = program.memory_bytes["peak"]
    for changed in (
        replace(program, collectives=(*others, replace(move, bytes=move.bytes + 1))),
        replace(program, collectives=others),
        replace(program, flops=(program.flops or 0.0) + 1),
        replace(program, memory_bytes={**program.memory_bytes, "peak": int(1.5 * peak)}),
    ):
        assert planned_otherwise(name, changed) != []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name in AGAIN else pytest.mark.exhaustive) for name in CASES],
)
def test_a_tpu_compiler_makes_what_is_stored(name):
    pytest.importorskip("libtpu")
    ((_, outcome),) = compiled([name])
    assert outcome.compiled.to_json() == STORED[name]
