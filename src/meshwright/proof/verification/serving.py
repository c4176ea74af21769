"""Verify a serving plan: compile the engine's step, or a prefill of whole prompts, for its hardware and compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from meshwright.execution.models.generation.serving_step import check_served
from meshwright.execution.models.generation.stationary import LEAST_TPU_ROWS
from meshwright.planning.cost.serving_bytes import serving_argument_bytes
from meshwright.planning.cost.serving_seconds import serving_device_flops, serving_flops
from meshwright.planning.serving.plan import ServingPlan, step_tokens
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest
from meshwright.proof.compiler.records import read_optimized
from meshwright.proof.compiler.targets import Effort
from meshwright.proof.simulate.schedule import Schedule
from meshwright.proof.verification.comparison import Row, compare
from meshwright.proof.verification.differences import UNNAMED, Cause, Difference
from meshwright.proof.verification.plans import compiled_record
from meshwright.proof.verification.serving_time import step_causes
from meshwright.record import Record
from meshwright.serving.engine.lowered import check_engine_step

ENGINE_STEP = "meshwright.serving.engine.lowered:lower_engine_step"
"""The function that lowers the engine's step (decode or a chunk of prompts), called by name where it is compiled."""

PROMPT_STEP = "meshwright.execution.models.generation.serving_step:lower_prefill_step"
"""The function that lowers the step in which `generate` reads whole prompts."""


@dataclass(frozen=True, kw_only=True)
class ServingVerification:
    """A serving plan and its compiled step, side by side.

    compiled: its record, with the compiler's lowerings undone. schedule: the simulated step; None where the program's
    schedule is not final, as at the TPU compiler's fast effort.
    """

    plan: ServingPlan
    program: CompiledProgram
    compiled: Record
    rows: tuple[Row, ...]
    schedule: Schedule | None

    def __str__(self) -> str:
        """Return the screen of `meshwright verify`, as plain text."""
        from meshwright.pictures.screens.verification import screen_text

        return screen_text(self)


def verify_serving(plan: ServingPlan, *, effort: Effort = "fast") -> ServingVerification:
    """Compile the step of a serving plan for its hardware, which need not be present, and compare it with the plan.

    effort: `fast` for counts and bytes, `default` for the schedule that will run. Raises where the compiler is not
    installed, or the planned step cannot be run or does not fit.
    """
    is_paged = plan.serving.is_paged
    if is_paged:
        check_engine_step(plan.serving, plan.layout)
    else:
        check_served(plan.serving, plan.mesh)
    request = CompileRequest(
        function=ENGINE_STEP if is_paged else PROMPT_STEP,
        hardware=plan.hardware,
        mesh=plan.mesh.layout,
        arguments={"serving": asdict(plan.serving), "cache": plan.cache},
        effort=effort,
    )
    program = compile_in_child(request)
    compiled, schedule = compiled_record(
        program,
        plan.mesh,
        plan.system,
        effort,
        flops=serving_flops(plan.serving, plan.batch),
        tokens=step_tokens(plan.serving, plan.batch),
    )
    predicted = replace(plan.predicted, flops=serving_device_flops(plan.serving, plan.layout, plan.batch))
    arguments = serving_argument_bytes(plan.serving, plan.layout, plan.batch)
    compared = compare(predicted, compiled, argument_bytes=arguments)
    # Arguments that XLA:TPU starts to copy into VMEM before the step: temporaries for the compiler, not for a plan.
    copies = (op for op in read_optimized(program).instructions() if "cross_program_prefetch_index" in op.attributes)
    rows = _with_server_causes(
        compared, plan, schedule, sum(op.shape.elements[0].padded_bytes for op in copies if op.opcode == "copy-start")
    )
    return ServingVerification(plan=plan, program=program, compiled=compiled, rows=tuple(rows), schedule=schedule)


def _with_server_causes(
    rows: tuple[Row, ...], plan: ServingPlan, schedule: Schedule | None, read_ahead_bytes: int
) -> Iterator[Row]:
    """Yield the rows, with the causes of differences that only a server's step has.

    schedule: the simulated step, if there is one. read_ahead_bytes: from `_read_ahead_bytes`.
    """
    is_decode = plan.serving.phase == "decode"
    exact_causes = _decode_causes if is_decode else _prefill_causes
    known = {
        Difference.EXPERT_BUFFERS: plan.mesh.ep > 1,
        Difference.SINGLE_ROWS: is_decode and plan.batch == plan.layout.num_groups,
    }
    has_scales = plan.serving.kv_dtype == "int8"
    for row in rows:
        is_unnamed = any(cause.difference in UNNAMED for cause in row.causes)
        if row.quantity == "step" and schedule is not None and plan.predicted.breakdown_seconds:
            yield replace(row, causes=step_causes(plan, schedule))
        elif read_ahead_bytes and row.quantity == "memory temporaries":
            yield replace(
                row, causes=(Cause(difference=Difference.READ_AHEAD, num_bytes=read_ahead_bytes), *row.causes)
            )
        elif has_scales and row.quantity == "memory arguments" and not row.is_equal:
            yield replace(row, causes=(Cause(difference=Difference.INT8_SCALES),))
        elif is_unnamed and row.unit == "flop" and (causes := exact_causes(row, plan)):
            yield replace(row, causes=causes)
        elif is_unnamed and row.unit == "B" and known[Difference.EXPERT_BUFFERS]:
            yield replace(row, causes=(Cause(difference=Difference.EXPERT_BUFFERS),))
        elif is_unnamed and row.unit == "flop":
            yield replace(
                row, causes=tuple(Cause(difference=one) for one, holds in known.items() if holds) or row.causes
            )
        else:
            yield row


def _decode_causes(row: Row, plan: ServingPlan) -> tuple[Cause, ...]:
    """Return the causes that account exactly for the compiled flops of a decode step; () if none do.

    Matmuls of a single row may run with padded rows (TPUs), and attention of a single row may have no matmul flops.
    """
    whole, products = (serving_device_flops(plan.serving, plan.layout, plan.batch, keys=keys) for keys in (None, 0.0))
    for rows, padded in ((1, ()), (LEAST_TPU_ROWS, (Difference.PADDED_ROWS,))):
        for attention, single in ((whole - products, ()), (0.0, (Difference.SINGLE_ROWS,))):
            if row.compiled == rows * products + attention:
                return tuple(Cause(difference=one) for one in (*padded, *single))
    return ()


def _prefill_causes(row: Row, plan: ServingPlan) -> tuple[Cause, ...]:
    """Return the causes that account exactly for the compiled flops of a prefill; () if none do.

    Possible causes are masked scores, kernels that declare other flops, and matmuls of single rows.

    Splash attention declares no flops, meshwright's kernels the flops of half of all scores. Without kernels all scores
    are computed, or, for whole sequences, all but those of the first half's queries with the second half's keys.
    """
    length, is_single = plan.serving.prompt_len, plan.batch == plan.layout.num_groups
    counted = {
        0.0: Difference.OPAQUE_KERNELS,
        length / 2: Difference.KERNEL_ESTIMATES,
        length * 3 / 4: Difference.MASKED_SCORES,
        float(length): Difference.MASKED_SCORES,
    }
    # A single row's logits have no flops if computed element by element, and on TPUs the flops of padded rows.
    of_single = {0: (Difference.SINGLE_ROWS,), LEAST_TPU_ROWS: (Difference.PADDED_ROWS,)} if is_single else {}
    for logits, rest in {1: (), **of_single}.items():
        for keys, difference in ((None, None), *counted.items()):
            flops = serving_device_flops(plan.serving, plan.layout, plan.batch, keys=keys, logits=logits)
            if row.compiled == flops:
                return tuple(Cause(difference=one) for one in (difference, *rest) if one is not None)
    return ()
