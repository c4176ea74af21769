"""Decode steps of a server, predicted and compiled for hardware that is not here.

    .venv/bin/python benchmarks/decode_programs.py [--models llama3-8b …] [--on v5e:4x4 …] [--batch 64]
        [--kv-dtype int8] [--gather] [--ops]

Each row is the mesh that `meshwright plan MODEL --serve decode` chooses for 64 sequences of 2,048 tokens: the predicted
step; the compiled step, by the compiler's own estimates, where attention reads pages with a kernel (whose time is that
of the bytes that it reads and writes), and with --gather where it gathers them first; the compiled step over the
predicted one; and how many quantities (flops, memory, collectives, step) are equal, and how many differ without a name.
Under a step of more than 1.3 times the prediction is its largest cause. With --ops, for TPUs: the ops of the compiled
step, the least time of one, and the fraction of the layers' weights whose reading is hidden behind other ops, which
`[small_ops]` of a chip's file has (src/meshwright/description/hardware/data). Needs libtpu and jax-cuda13-plugin. Half
an hour on two cores, twice that with --gather.
"""

import argparse
from unittest import mock

import meshwright as mw
from meshwright.description.step.serve import serve_step
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.serving_seconds import layers_read_seconds, matmul_times
from meshwright.proof.simulate.schedule import EXPOSED_COPIES
from meshwright.proof.verification import serving
from meshwright.proof.verification.differences import UNNAMED
from meshwright.proof.verification.serving_time import step_parts
from meshwright.units import show_bytes, show_percent, show_seconds

MODELS = (
    "llama3-8b", "qwen3-8b", "gemma2-9b", "gemma3-1b", "phi3-mini", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2",
)  # fmt: skip
HARDWARE = ("v5e:4x4", "v6e:2x2", "tpu7x:2x2x1", "h100:8")


def lower_gathered(mesh, **arguments):
    """The engine's step without kernels; called in the compiler's process."""
    from meshwright.execution.models.generation import cached_attention
    from meshwright.serving.engine.lowered import lower_engine_step

    with mock.patch.object(cached_attention, "_kernel_of", return_value=None):
        return lower_engine_step(mesh, **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--on", nargs="+", default=HARDWARE)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kv-dtype")
    parser.add_argument("--gather", action="store_true", help="compile the step without kernels too")
    parser.add_argument(
        "--ops", action="store_true", help="print the number of ops, their least time, and what it hides"
    )
    args = parser.parse_args()
    gather = f"{'gather':>10}" if args.gather else ""
    ops = f"{'ops':>7}{'least':>9}{'hidden':>8}" if args.ops else ""
    print(f"{'':14}{'':13}{'mesh':24}{'predicted':>10}{'kernel':>10}{gather}{'c/p':>6}{'equal':>10}{'unnamed':>9}{ops}")
    for model in args.models:
        for on in args.on:
            print(f"{model:14}{on:13}{line(model, on, args)}", flush=True)


def line(model: str, on: str, args: argparse.Namespace) -> str:
    """A row of the table after its model and hardware."""
    try:
        plan = mw.plan(
            model, on, serve="decode", batch=args.batch, prompt_len=1024, output_len=1024, kv_dtype=args.kv_dtype
        )
        if not plan.predicted.fits:
            needed, usable = plan.predicted.memory_bytes["peak"], plan.system.plannable_bytes
            return f"{plan.layout.mesh!s:24}needs {show_bytes(needed)} a device, of {show_bytes(usable)}"
        compiled = [serving.verify_serving(plan, effort="default")]
        with mock.patch.object(serving, "ENGINE_STEP", f"{__file__}:lower_gathered"):
            compiled += [serving.verify_serving(plan, effort="default")] if args.gather else []
    except MeshwrightError as error:
        return str(error).partition("\n")[0][:100]
    rows = compiled[0].rows
    equal = sum(row.is_equal for row in rows)
    unnamed = sum(any(cause.difference in UNNAMED for cause in row.causes) for row in rows if not row.is_equal)
    steps = [plan.seconds, *(found.compiled.step_seconds for found in compiled)]
    times = "".join(f"{1000 * seconds:7.2f} ms" if seconds else f"{'-':>10}" for seconds in steps)
    ratio = steps[1] / steps[0] if steps[1] else float("nan")
    causes = next(row.causes for row in rows if row.quantity == "step") if ratio > 1.3 else ()
    largest = f"\n{'':29}{causes[0]}" if causes else ""
    ops = of_ops(compiled[0]) if args.ops and plan.system.chip.kind == "tpu" else ""
    return f"{plan.layout.mesh!s:24}{times}{ratio:6.2f}{f'{equal} of {len(rows)}':>10}{unnamed:9}{ops}{largest}"


def of_ops(found: serving.ServingVerification) -> str:
    """The columns of --ops. What is hidden of the weights is no time of matmuls beyond their least, and of no copy."""
    plan, parts = found.plan, step_parts(found.schedule)
    shown = parts.rest["matmuls with weights"] + parts.rest.get(EXPOSED_COPIES, 0.0)
    terms = plan.predicted.breakdown_seconds
    hidden = terms["weights"] + terms["products"] - shown
    step = serve_step(plan.serving, plan.layout, plan.batch)
    read = layers_read_seconds(matmul_times(step, plan.serving, plan.system), plan.system)
    return f"{parts.count:7,}{show_seconds(parts.least_seconds):>9}{show_percent(max(0.0, hidden) / read):>8}"


if __name__ == "__main__":
    main()
