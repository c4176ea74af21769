"""Train steps and products of one GPU that is here, predicted beside measured: step, MFU, peak of memory.

    .venv/bin/python benchmarks/gpu_train_step.py [--rows llama3-8b gpt2-xl …] [--steps 8] [--json FILE] [--trace DIR]

The plan is the planner's best for one such GPU. Each model runs in a process of its own, whose peak of memory is
therefore its own: random tokens, the median of the steps after the first two. `compiled` is XLA's own figure of the
memory. Of products, [m, k] @ [k, n] in bfloat16 with float32 sums, the median of 5 times 20, one after the other. Set
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, so that JAX takes the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, here, measured_apart

ROWS = {
    "llama3-8b": {"num_layers": 4, "batch": 8, "seq_len": 2048},
    "gpt2-xl": {"batch": 16, "seq_len": 1024},
    "qwen3-8b": {"num_layers": 6, "batch": 4, "seq_len": 8192},
    "gemma3-1b": {"batch": 8, "seq_len": 4096},
    "mixtral-8x7b": {"num_layers": 1, "batch": 8, "seq_len": 4096},
    "llama3-8b long": {"num_layers": 2, "batch": 1, "seq_len": 65536},
    "llama3-8b lora": {"batch": 4, "seq_len": 2048, "lora_rank": 16},
    "llama3-8b qlora": {"batch": 4, "seq_len": 2048, "lora_rank": 16, "quantize_base": "nf4"},
}
"""Models, some of them cut to a few layers, and what a step reads."""

ATTENTION = (
    (8, 32, 8, 2048, 128), (2, 32, 8, 8192, 128), (1, 32, 8, 32768, 128), (8, 25, 25, 1024, 64), (8, 12, 12, 4096, 64),
    (2, 64, 64, 4096, 192), (8, 4, 1, 4096, 256),
)  # fmt: skip
"""Sequences, query heads, kv heads, tokens and head dim of causal attention alone, by cuDNN in bfloat16."""

PRODUCTS = (
    (16384, 4096, 4096), (16384, 4096, 14336), (16384, 14336, 4096), (4096, 16384, 14336), (16384, 4096, 128256),
    (16384, 1600, 6400), (8192, 8192, 8192), (2048, 4096, 14336), (256, 4096, 14336), (16, 4096, 14336),
)  # fmt: skip
"""m, k, n of products alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="a folder for a trace of one more step of each model")
    args = parser.parse_args()
    found: list[Row] = []
    for row in measured_apart((*args.rows, "products", "attention"), measure, args.steps, args.trace):
        print(line(row), flush=True)
        found.append(row)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")


def line(row: Row) -> str:
    """A row in words: predicted | measured, their ratio, and a step's memory, predicted | compiled | measured."""
    if "error" in row:
        return f"{row['row']:32}{row['error']}"
    times = [f"{1000 * row[f'{which}_seconds']:9.2f} ms" for which in ("predicted", "measured")]
    text = f"{row['row']:32}{row.get('run as', ''):24}{''.join(times)}{row['ratio']:7.2f}"
    sizes = [row.get(f"memory_{which}") for which in ("predicted", "compiled", "measured")]
    return text + "".join(f"{size / 1e9:8.1f} GB" for size in sizes if size is not None)


def measure(name: str, steps: int, trace: Path | None) -> list[Row]:
    """The rows of one model, or of products or attention alone."""
    match name:
        case "products":
            return products()
        case "attention":
            return attention()
        case _:
            return [train(name, steps, trace)]


def train(name: str, steps: int, trace: Path | None = None) -> Row:
    """A row of one model."""
    import jax
    import numpy as np

    import meshwright
    from meshwright.description.step.rules import rules_of
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.execution.runtime.program_memory import program_memory
    from meshwright.execution.runtime.sharding_context import ShardingContext
    from meshwright.execution.training.program import StepProgram
    from meshwright.execution.training.step import initial_state, train_step
    from meshwright.execution.training.update.optimizer import Optimizer

    plan: Any = meshwright.plan(name.split()[0], str(here()), **ROWS[name])
    workload, predicted = plan.workload, plan.predicted
    model = workload.model
    mesh, layout = build_mesh(plan.mesh), ShardingContext(plan.mesh, rules_of(plan.strategy))
    optimizer = Optimizer()
    text = np.random.default_rng(0).integers(0, model.vocab, (workload.batch, workload.seq_len + 1), dtype=np.int32)
    with jax.set_mesh(mesh):
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
        state = initial_state(workload, layout, optimizer, mesh, plan.strategy, seed=0)
        program = StepProgram(train_step(workload, layout, optimizer, plan.strategy), print)
        times, losses = [], []
        for _ in range(steps):
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(program(state, batch))
            times.append(time.perf_counter() - began)
            losses.append(float(metrics["loss"]))
        if trace is not None:
            with jax.profiler.trace(str(trace / name.replace(" ", "_"))):
                jax.block_until_ready(program(state, batch))
    assert program.compiled is not None
    seconds = statistics.median(times[2:])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "row": name,
        "device": jax.devices()[0].device_kind,
        "run as": f"remat {workload.remat} {plan.strategy.attention} m{plan.strategy.num_microbatches}",
        "predicted_seconds": predicted.step_seconds,
        "measured_seconds": seconds,
        "ratio": predicted.step_seconds / seconds,
        "mfu_predicted": predicted.mfu,
        "mfu_measured": predicted.mfu * predicted.step_seconds / seconds,
        "memory_predicted": predicted.memory_bytes["peak"],
        "memory_compiled": program_memory(program.compiled, on_tpu=False)["peak"],
        "memory_measured": stats.get("peak_bytes_in_use"),
        "breakdown_seconds": dict(predicted.breakdown_seconds),
        "seconds": times,
        "losses": losses,
    }


def products() -> list[Row]:
    """Rows of products alone."""
    import jax
    import jax.numpy as jnp

    from meshwright.planning.cost.rates.efficiency import gpu_figures, gpu_product_seconds
    from meshwright.planning.cost.roofline import matmul_bytes

    system, rows = here(), []
    for m, k, n in PRODUCTS:
        keys = jax.random.split(jax.random.key(0))
        x, w = jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)

        multiply = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
        moved = matmul_bytes(m, k, n, weight_dtype="bf16", activation_dtype="bf16")
        planned = gpu_product_seconds(gpu_figures(system.chip.name), system, m, k, n, moved_bytes=moved)
        seconds = measured_seconds(multiply, x, w)
        rows.append({
            "row": f"[{m}, {k}] @ [{k}, {n}]",
            "predicted_seconds": planned,
            "measured_seconds": seconds,
            "ratio": planned / seconds,
            "flops_per_second": 2 * m * k * n / seconds,
        })  # fmt: skip
    return rows


def attention() -> list[Row]:
    """Rows of attention alone: the forward pass, and forward and backward."""
    import jax
    import jax.numpy as jnp

    from meshwright.planning.cost.rates.attention import fused_attention_time

    system, rows = here(), []
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    both = jax.grad(lambda *args: jnp.sum(attend(*args).astype(jnp.float32)), argnums=(0, 1, 2))
    for batch, heads, kv_heads, length, dim in ATTENTION:
        query, key, value = (
            jax.random.normal(jax.random.key(index), (batch, length, count, dim), jnp.bfloat16)
            for index, count in enumerate((heads, kv_heads, kv_heads))
        )
        planned = fused_attention_time(2 * batch * heads * length**2 * dim, length, dim, dim, "cudnn", system)
        for phase, run, seconds in (
            ("forward", attend, planned.forward),
            ("both", both, planned.forward + planned.backward),
        ):
            taken = measured_seconds(jax.jit(run), query, key, value)
            name = f"{batch} x {length} x {heads}/{kv_heads} x {dim} {phase}"
            rows.append(
                {"row": name, "predicted_seconds": seconds, "measured_seconds": taken, "ratio": seconds / taken}
            )
    return rows


def measured_seconds(run: Callable[..., Any], *args: Any) -> float:
    """The seconds of a call: the median of 5 times 20, one after the other."""
    import jax

    jax.block_until_ready(run(*args))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            made = run(*args)
        jax.block_until_ready(made)
        times.append((time.perf_counter() - began) / 20)
    return statistics.median(times)


if __name__ == "__main__":
    main()
