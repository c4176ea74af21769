"""A plan held against the program that the compiler of its hardware makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshwright.compiled.compare import Row, compare, in_plans_terms
from meshwright.compiled.compile import compile_in_child
from meshwright.compiled.program import CompiledProgram, CompileRequest
from meshwright.compiled.report import read_program
from meshwright.compiled.targets import Effort
from meshwright.cost import argument_bytes
from meshwright.planner import Plan
from meshwright.record import Record

TRAIN_STEP = "meshwright.training.step:lower_train_step"
"""The function that lowers the step, called in the process that compiles: training stands above this package."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the compiler made of a plan's step, in a plan's terms, and every quantity of both side by side."""

    program: CompiledProgram
    compiled: Record
    rows: tuple[Row, ...]


def verify(plan: Plan, *, effort: Effort = "fast") -> Verification:
    """The train step of a plan, compiled by the compiler of its hardware, which need not be there, beside the plan.

    effort: `fast` for counts and bytes, `default` for the schedule that will really run. Raises where the compiler is
    not installed or the program does not fit.
    """
    request = CompileRequest(
        function=TRAIN_STEP,
        hardware=plan.hardware,
        mesh=plan.mesh.layout,
        arguments={"workload": asdict(plan.workload)},
        effort=effort,
    )
    program = compile_in_child(request)
    compiled = in_plans_terms(read_program(program, plan.mesh, plan.hardware))
    rows = compare(plan.predicted, compiled, argument_bytes=argument_bytes(plan.workload, plan.mesh))
    return Verification(program=program, compiled=compiled, rows=rows)
