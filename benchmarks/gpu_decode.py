"""Decode steps of one GPU that is here, predicted beside measured: milliseconds, tokens/s, share of HBM's bandwidth.

    .venv/bin/python benchmarks/gpu_decode.py [--rows "llama3-8b 64x2048" …] [--steps 20] [--json FILE]

A row is a model (with `:N`, its first N layers) and rows x tokens: so many sequences, each with so many tokens in the
cache. The step is the server's own (`greedy_program`), with random weights and pages, every sequence at its full
length. Measured: the median of steps that are waited for, and the mean of steps that are only dispatched (the host's
work is hidden). HBM: weights and cache, read once, over the measured time and the chip's bandwidth. Each row runs in a
process of its own. Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, so that JAX takes the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROWS = (
    "llama3-8b 1x2048", "llama3-8b 16x2048", "llama3-8b 64x2048", "llama3-8b 128x2048", "llama3-8b 16x16384",
    "gemma3-1b 64x4096", "mixtral-8x7b:8 32x2048", "deepseek-v2-lite 32x2048",
)  # fmt: skip
"""A model, the number of sequences and the tokens of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on", help="plan for this chip instead of the one that is here, as h100")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    found: list[dict[str, Any]] = []
    print(f"{'':26}{'predicted':>12}{'waited for':>12}{'dispatched':>12}  p/m   of HBM    tokens/s")
    for name in args.rows:
        mine, theirs = spawn.Pipe(duplex=False)
        child = spawn.Process(target=send, args=(name, args.steps, args.on, theirs))
        child.start()
        theirs.close()
        try:
            row = mine.recv()
        except EOFError:
            row = {"row": name, "error": "its process ended"}
        child.join()
        print(line(row), flush=True)
        found.append(row)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    if "error" in row:
        return f"{row['row']:26}{row['error']}"
    times = "".join(f"{1000 * row[name]:9.2f} ms" for name in ("predicted_seconds", "seconds", "dispatched_seconds"))
    return f"{row['row']:26}{times}{row['ratio']:6.2f}{row['hbm_share']:8.0%}{row['tokens_per_second']:12,.0f}"


def send(name: str, steps: int, on: str | None, to: Any) -> None:
    """Send the row of one model."""
    try:
        row = measure(name, steps, on)
    except Exception as error:  # A row that fails is told, and ends no other.
        row = {"row": name, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
    to.send(row)


def measure(name: str, steps: int, on: str | None) -> dict[str, Any]:
    """A row of one model."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.description.families.registry import PRESETS
    from meshwright.description.hardware.load import chip_names
    from meshwright.description.hardware.system import parse_system
    from meshwright.description.step.serve import table_entries
    from meshwright.description.step.serving import Serving, ServingLayout
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.mesh import MeshShape
    from meshwright.planning.serving.plan import make_serving_plan
    from meshwright.serving.engine.lowered import lower_engine_step
    from meshwright.serving.engine.programs import FROM_LAST, Columns, Shape

    kind = jax.devices()[0].device_kind.lower()
    system = parse_system((on or next(chip for chip in chip_names() if chip.split("-")[0] in kind)) + ":1")
    title, size = name.split()
    title, _, layers = title.partition(":")
    model = PRESETS[title]
    model = replace(model, num_layers=int(layers)) if layers else model
    batch, context = map(int, size.split("x"))
    serving = Serving(model=model, prompt_len=context - 64, output_len=64, batch=batch)
    layout = ServingLayout(MeshShape())
    plan = make_serving_plan(serving, layout, system)
    lowered = lower_engine_step(build_mesh(MeshShape()), serving=asdict(serving), cache="heads")
    compiled = lowered.compile()
    (params, pages, last, numbers, _), _ = lowered.args_info
    draw = jax.jit(
        lambda key, shape, dtype: 0.02 * jax.random.normal(key, shape, dtype), static_argnames=("shape", "dtype")
    )
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    params, pages = (
        jax.tree.map(lambda leaf: draw(next(keys), leaf.shape, leaf.dtype), tree) for tree in (params, pages)
    )
    entries = table_entries(serving)
    columns = Shape(batch, 1, entries).columns
    table = np.zeros(numbers.shape, np.int32)
    table[:, Columns.row] = np.arange(batch)
    table[:, Columns.start] = context - 1
    table[:, Columns.count] = table[:, Columns.is_chosen] = table[:, Columns.drawn] = 1
    table[:, Columns.prefill_length] = serving.prompt_len
    table[:, columns.tokens] = FROM_LAST
    for (first, listed), count in zip(columns.tables, entries, strict=True):
        table[:, first] = max(0, (context - 1) // serving.page_size - (count - 1))
        table[:, listed] = np.arange(batch * count).reshape(batch, count)
    last = jnp.arange(batch, dtype=last.dtype)
    places, _ = compiled.input_shardings
    params, pages, last, numbers = jax.device_put((params, pages, last, table), places[:4])

    def step() -> Any:
        nonlocal pages, last
        pages, last, made = compiled(params, pages, last, numbers, None)
        return made

    times = []
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(steps):
        made = step()
    jax.block_until_ready(made)
    dispatched = (time.perf_counter() - began) / steps
    seconds, memory = statistics.median(times[2:]), plan.predicted.memory_bytes
    read = memory["weights"] + memory["cache"]
    return {
        "row": name,
        "device": jax.devices()[0].device_kind,
        "predicted_seconds": plan.seconds,
        "seconds": seconds,
        "dispatched_seconds": dispatched,
        "ratio": plan.seconds / dispatched,
        "hbm_share": read / dispatched / system.hbm_bytes_per_second,
        "tokens_per_second": batch / dispatched,
        "memory": memory,
        "breakdown_seconds": dict(plan.predicted.breakdown_seconds),
        "memory_measured": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


if __name__ == "__main__":
    main()
