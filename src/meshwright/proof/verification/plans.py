"""Verify a plan: compile its train step for its hardware and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from meshwright.description.hardware.system import System
from meshwright.description.step.reference import reference_pass
from meshwright.description.step.sequence import attention_ops, is_zigzag
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.cost.comm_volume import (
    dropless_padding_collectives,
    step_collectives,
    untaken_branch_collectives,
)
from meshwright.planning.cost.flops import (
    StepFlops,
    attention_flops,
    dropless_padding_flops,
    model_flops,
    single_column_flops,
    untaken_branch_flops,
)
from meshwright.planning.cost.rates.attention import TPU_PRODUCTS, tpu_chunk_kernel, tpu_kernel, tpu_kernel_width
from meshwright.planning.plan import Plan, as_run
from meshwright.proof.compiler.compile import compile_all, compile_in_child
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest
from meshwright.proof.compiler.records import read_optimized, read_program
from meshwright.proof.compiler.targets import Effort
from meshwright.proof.simulate.schedule import Schedule, simulate
from meshwright.proof.verification.comparison import Row, StaticOverhead, compare, in_plans_terms, quantity_of
from meshwright.proof.verification.differences import Cause, Difference
from meshwright.proof.verification.reference import reference_requests, with_reference
from meshwright.record import Collective, Record

TRAIN_STEP = "meshwright.execution.training.step:lower_train_step"
"""The function that lowers the train step, called by name in the process that compiles."""

ORDER_NOT_FINAL = "step time and overlap are judged at the compiler's default effort: --effort default"
"""Note of a record whose program was compiled at fast effort, which does not give the schedule that will run."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan and its compiled train step, side by side.

    plan: as `meshwright train` runs it. compiled: its record, with the compiler's lowerings undone. schedule: the
    simulated step; None where the program's schedule is not final, as at the TPU compiler's fast effort.
    """

    plan: Plan
    program: CompiledProgram
    compiled: Record
    rows: tuple[Row, ...]
    schedule: Schedule | None

    @property
    def expected(self) -> tuple[Collective, ...]:
        """The collectives the program should have: those of the plan, known overheads, and explained differences."""
        wanted = (*self.plan.predicted.own_collectives, *(move for _, move in static_overhead(self.plan).collectives))
        not_predicted = Cause(difference=Difference.NOT_PREDICTED)
        unnamed = {row.quantity for row in self.rows if not_predicted in row.causes}
        known = unnamed | {quantity_of(move.kind, move.axes, move.phase) for move in wanted}
        others = self.compiled.own_collectives
        return wanted + tuple(one for one in others if quantity_of(one.kind, one.axes, one.phase) not in known)

    def __str__(self) -> str:
        """Return the screen of `meshwright verify`, as plain text."""
        from meshwright.pictures.screens.verification import screen_text

        return screen_text(self)


def verify_plan(plan: Plan, *, effort: Effort = "fast", measured: Record | None = None) -> Verification:
    """Compile the train step of a plan for its hardware, which need not be present, and compare it with the plan.

    effort: `fast` for counts and bytes, `default` for the schedule that will run. measured: the record of a run. Raises
    where the compiler is not installed, or the step cannot run or does not fit.
    """
    plan = as_run(plan)
    return _verification(plan, [compile_in_child(request) for request in _requests(plan, effort)], effort, measured)


def static_overhead(plan: Plan) -> StaticOverhead:
    """Return the known contents of a program's HLO text beyond its plan: padding and untaken branches."""
    workload, mesh, strategy = plan.workload, plan.mesh, plan.strategy
    kind = plan.system.chip.kind
    moves = {
        Difference.DROPLESS_PADDING: dropless_padding_collectives(workload, mesh, strategy, is_ragged=kind != "cpu"),
        Difference.UNTAKEN_BRANCHES: untaken_branch_collectives(workload, mesh, strategy),
        Difference.SUMMED_ONCE: _summed_once(plan),
    }
    # Attention flops that kernels declare minus those planned, also in a frozen reference model's forward pass.
    steps = [(attention_flops(workload, mesh, strategy), workload, mesh, strategy)]
    if own := reference_pass(workload, mesh, strategy):
        forward = StepFlops(forward=attention_flops(*own).forward)
        steps.append((forward, own.workload, own.mesh, own.strategy))
    of_kernels: dict[Difference, float] = {}
    for step in steps:
        for difference, flops in _declared_beyond(*step, plan.system).items():
            of_kernels[difference] = of_kernels.get(difference, 0.0) + flops
    return StaticOverhead(
        flops={
            Difference.DROPLESS_PADDING: dropless_padding_flops(workload, mesh, strategy, has_ragged=kind == "tpu"),
            Difference.UNTAKEN_BRANCHES: untaken_branch_flops(workload, mesh, strategy),
            Difference.SINGLE_ROWS: 0.0 if kind == "cpu" else -single_column_flops(workload, mesh, strategy),
            **of_kernels,
        },
        collectives=tuple((difference, move) for difference, found in moves.items() for move in found),
    )


def _declared_beyond(
    planned: StepFlops, workload: Workload, mesh: MeshShape, strategy: Strategy, system: System
) -> dict[Difference, float]:
    """Return the attention flops that compiled kernels declare minus `planned`, by the kind of difference.

    It is empty where both agree, as for attention without a kernel. Splash attention and cuDNN's kernels declare no
    flops. Meshwright's kernels declare the flops of half of the scores (the mask is causal), and in backward seven
    matmuls, of which two are recomputed; the plan counts five.
    """
    kernel = strategy.attention
    if kernel == "flash" and system.chip.kind == "tpu":
        is_in_chunks = is_zigzag(mesh, strategy)
        kernel = tpu_chunk_kernel(workload.seq_len // mesh.sp) if is_in_chunks else tpu_kernel(workload.seq_len)
        if kernel == "flash":
            op = next(attention_ops(workload.model))
            width = {name: tpu_kernel_width(name, op.qk_dim, op.value_dim) for name in TPU_PRODUCTS}
            made = width["dkv"] + width["dq"]
            backward = made / (made - width["fwd"])
            declared = (planned.forward + planned.recompute + backward * planned.backward) / 2
            return {Difference.KERNEL_ESTIMATES: declared - planned.total}
    return {Difference.OPAQUE_KERNELS: -planned.total} if kernel in ("splash", "cudnn") else {}


def _summed_once(plan: Plan) -> Iterator[Collective]:
    """Yield a correction of each planned all-reduce that XLA:GPU runs once a step and not once a microbatch.

    It is a collective with negative bytes, to be added to the planned one. XLA moves the all-reduce of the last norm's
    gradient out of the loop over microbatches. It does not move those of layers' gradients, which are in an inner loop
    over layers.
    """
    parts = plan.strategy.num_microbatches
    if plan.system.chip.kind != "gpu" or plan.mesh.pp > 1 or parts == 1:
        return
    for move in step_collectives(plan.workload, plan.mesh, plan.strategy):
        if move.array == "final_norm":
            yield replace(move, bytes=move.bytes // parts - move.bytes, count=move.count // parts - move.count)


def verify_all(
    plans: Sequence[Plan], *, effort: Effort = "fast"
) -> Iterator[tuple[int, Verification | MeshwrightError]]:
    """Verify plans in parallel; yield (plan's index, verification or error) as each is done, see `compile_all`."""
    run = [as_run(plan) for plan in plans]
    requests = [(number, request) for number, plan in enumerate(run) for request in _requests(plan, effort)]
    outcomes: dict[int, CompiledProgram | MeshwrightError] = {}
    for place, outcome in compile_all([request for _, request in requests]):
        outcomes[place], plan_number = outcome, requests[place][0]
        places = [at for at, (number, _) in enumerate(requests) if number == plan_number]
        if any(at not in outcomes for at in places):
            continue
        found = [outcomes[at] for at in places]
        failed = next((one for one in found if isinstance(one, MeshwrightError)), None)
        programs = [one for one in found if isinstance(one, CompiledProgram)]
        yield plan_number, failed or _verification(run[plan_number], programs, effort, None)


def _requests(plan: Plan, effort: Effort) -> tuple[CompileRequest, ...]:
    """Return the requests to compile a plan's step: one, and a second for a frozen reference model."""
    return step_request(plan, effort=effort), *reference_requests(plan, effort=effort)


def step_request(plan: Plan, *, effort: Effort) -> CompileRequest:
    """Return the request to compile a plan's train step."""
    return CompileRequest(
        function=TRAIN_STEP,
        hardware=plan.hardware,
        mesh=plan.mesh.layout,
        arguments={"workload": asdict(plan.workload), "strategy": asdict(plan.strategy)},
        effort=effort,
    )


def _verification(
    plan: Plan, programs: Sequence[CompiledProgram], effort: Effort, measured: Record | None
) -> Verification:
    """Return the verification of a plan. programs: its step and, if there is a frozen reference model, the model's."""
    program, *others = programs
    needed = {"flops": model_flops(plan.workload), "tokens": plan.workload.tokens}
    compiled, schedule = compiled_record(program, plan.mesh, plan.system, effort, **needed)
    own = reference_pass(plan.workload, plan.mesh, plan.strategy)
    for other in others:
        assert own is not None
        beside, _ = compiled_record(other, own.mesh, plan.system, effort, **needed)
        compiled = with_reference(compiled, beside, plan)
    if measured is not None:
        compiled = replace(compiled, notes=(*compiled.notes, *measured.notes))
    arguments = argument_bytes(plan.workload, plan.mesh, plan.strategy, kind=plan.system.chip.kind)
    rows = compare(
        plan.predicted,
        compiled,
        argument_bytes=arguments,
        measured=measured,
        overhead=static_overhead(plan),
        reference_mesh=own and own.mesh,
    )
    return Verification(plan=plan, program=program, compiled=compiled, rows=rows, schedule=schedule)


def compiled_record(
    program: CompiledProgram, mesh: MeshShape, system: System, effort: Effort, *, flops: float, tokens: int
) -> tuple[Record, Schedule | None]:
    """Return (record of a program with lowerings undone, simulated step); no step if the schedule is not final.

    flops: model flops of a step of `tokens` tokens.
    """
    compiled = in_plans_terms(read_program(program, mesh, str(system)))
    if system.chip.kind == "tpu" and effort != "default":
        return replace(compiled, notes=(*compiled.notes, ORDER_NOT_FINAL)), None
    schedule = simulate(read_optimized(program), mesh.layout, system)
    found = replace(
        compiled,
        step_seconds=schedule.step_seconds,
        mfu=schedule.mfu(flops),
        tokens_per_second=tokens / schedule.step_seconds,
        breakdown_seconds=dict(schedule.breakdown_seconds),
        notes=(*compiled.notes, *schedule.notes),
    )
    return found, schedule
