"""Decode steps of one GPU that is here, predicted beside measured: milliseconds, tokens/s, share of HBM's bandwidth.

    .venv/bin/python benchmarks/gpu_decode.py [--rows "llama3-8b 64x2048 int4" …] [--steps 20] [--kernels] [--json FILE]
    .venv/bin/python benchmarks/gpu_decode.py --kept

A row is a model (with `:N`, its first N layers) and rows x tokens: so many sequences, each with so many tokens in the
cache; then, if they are not bf16, the dtype of weights and that of the cache, as in `int8` or `bf16 fp8`. The step is
the server's own (`greedy_program`), with random weights and pages, every sequence at its full length. Measured: the
median of steps that are waited for, and the mean of steps that are only dispatched (the host's work is hidden); how
many kernels ran in a step, by JAX's profiler, and the seconds in which one did. HBM: weights and cache, read once, over
the measured time and the chip's bandwidth. With --kept: what an H200 took, kept in `tests/data/measured_h200.json`,
beside the plan of today; no GPU is needed. Each row runs in a process of its own. Set
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, so that JAX takes the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, here, measured_apart, traced_kernels

ROWS = (
    "llama3-8b 1x2048", "llama3-8b 16x2048", "llama3-8b 64x2048", "llama3-8b 128x2048", "llama3-8b 16x16384",
    "gemma3-1b 64x4096", "mixtral-8x7b:8 32x2048", "deepseek-v2:2 32x2048", "qwen3-8b 64x2048", "gemma2-9b 64x2048",
    "phi3-mini 32x2048", "gpt-oss-20b 32x2048", "llama3-8b 64x2048 int8", "llama3-8b 64x2048 int4",
    "llama3-8b 64x2048 fp8", "llama3-8b 64x2048 bf16 fp8", "llama3-8b 64x2048 bf16 int8", "llama3-8b 1x2048 int4",
    "mixtral-8x7b:8 32x2048 int4", "llama3-8b 128x2048 int4 fp8",
)  # fmt: skip
"""A model, the number of sequences and the tokens of each, and dtypes."""


TRACED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on", help="plan for this chip instead of the one that is here, as h100")
    parser.add_argument("--kernels", action="store_true", help="compare the kernels' results with the gather's alone")
    parser.add_argument("--kept", action="store_true", help="print what is kept of an H200 instead of measuring")
    args = parser.parse_args()
    if args.kernels:
        for case in KERNELS:
            print(*case, f"{kernel_error(*case):.1e}")
        for sizes in GROUPED:
            print("int4", *sizes, *(f"{figure:.1e}" for figure in grouped_product(*sizes)))
        return
    found: list[Row] = []
    print(f"{'':28}{'predicted':>12}{'waited for':>12}{'dispatched':>12}  p/m   of HBM    tokens/s  kernels")
    for row in kept() if args.kept else measured_apart(args.rows, measure, args.steps, args.on):
        print(line(row), flush=True)
        found.append(row)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")


KERNELS = (
    ("float32", "float32", 1, 4, (128,), None, None), ("bfloat16", "bfloat16", 1, 4, (128,), None, None),
    ("bfloat16", "bfloat16", 2, 8, (64,), 100, None), ("bfloat16", "bfloat16", 5, 2, (256,), None, 30.0),
    ("bfloat16", "int8", 1, 4, (128,), None, None),
    ("float32", "float32", 1, 16, (512, 64), None, None), ("bfloat16", "bfloat16", 1, 128, (512, 64), None, None),
    ("bfloat16", "int8", 2, 40, (512, 64), None, None), ("bfloat16", "float8_e4m3fn", 1, 4, (128,), None, None),
    ("bfloat16", "float8_e4m3fn", 2, 8, (256,), 100, 30.0),
)  # fmt: skip
"""dtypes of queries and of the cache, tokens, query heads of a kv head, dims of a head (of latents and of rotary keys),
window and softcap."""


GROUPED = ((1, 4096, 14336, True), (16, 4096, 14336, True), (64, 14336, 4096, False))
"""rows, inputs and outputs of a matmul with an int4 weight in groups of 128, and whether groups have zero points."""


def grouped_product(rows: int, inputs: int, outputs: int, has_zeros: bool) -> tuple[float, float]:
    """The largest error of the kernel for int4 weights, over the largest value, and the seconds of one call."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.execution.models.quantised.scaled import ScaledWeight
    from meshwright.execution.models.quantised.scaled_kernel import multiply_scaled_blocks

    random, groups = np.random.default_rng(0), inputs // 128
    codes = random.integers(-8, 8, (1, groups, 128, outputs))
    packed = (codes[:, :, :64] & 15) | ((codes[:, :, 64:] & 15) << 4)
    zero = jnp.asarray(random.integers(-8, 8, (1, groups, 1, outputs)), jnp.int8) if has_zeros else None
    scale = jnp.asarray(random.uniform(0.005, 0.02, (1, groups, 1, outputs)), jnp.bfloat16)
    weight = ScaledWeight(jnp.asarray(packed, jnp.uint8), scale, zero, (), ())
    x = jnp.asarray(random.normal(size=(rows, inputs)), jnp.bfloat16)
    whole = (codes - (0 if zero is None else zero.astype(jnp.float32))) * scale.astype(jnp.float32)
    wanted = jnp.matmul(x.astype(jnp.float32), whole.reshape(inputs, outputs), precision="highest")
    multiply = jax.jit(lambda x, weight: multiply_scaled_blocks(x, weight, jnp.array([[0, 0, rows]]), rows))
    found = jax.block_until_ready(multiply(x, weight))
    began = time.perf_counter()
    for _ in range(100):
        made = multiply(x, weight)
    jax.block_until_ready(made)
    error = float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))
    return error, (time.perf_counter() - began) / 100


def kernel_error(
    dtype: str,
    stored: str,
    length: int,
    group: int,
    dims: tuple[int, ...],
    window: int | None,
    softcap: float | None,
) -> float:
    """The largest difference between attention by the kernel and by a gather in float32, over the largest value."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.execution.models.attention import Scoring
    from meshwright.execution.models.generation.paged_cache import Pages, TokenSizes, read_pages
    from meshwright.execution.models.generation.paged_kernel import attend_to_pages

    random, scoring, is_latent = (
        np.random.default_rng(0),
        Scoring(divisor=sum(dims) ** 0.5, softcap=softcap),
        len(dims) > 1,
    )
    batch, heads, layers, entries, slots = 3, 1 if is_latent else 2, 2, 37, 16
    table = jnp.asarray(random.permutation(batch * entries).reshape(batch, entries), jnp.int32)
    first = jnp.asarray([0, 2, 0], jnp.int32)
    positions = jnp.asarray([[400], [500], [3]]) + jnp.arange(length)[None]
    query = jnp.asarray(random.normal(size=(batch, length, heads, group, sum(dims))), dtype)
    sizes = TokenSizes(heads, dims[0], dims[-1])
    pages, width = (layers, batch * entries, slots), heads * sizes.of_head
    if stored == "int8":
        scales = random.uniform(0.005, 0.02, (layers, batch * entries, 1, 2 * heads * slots))
        pages = wide = Pages(
            jnp.asarray(random.integers(-127, 128, (*pages, width)), jnp.int8), jnp.asarray(scales, jnp.float32)
        )
    else:
        pages = Pages(jnp.asarray(random.normal(size=(*pages, width)), dtype))
        wide = Pages(pages.rows.astype(jnp.float32))

    @jax.jit
    def by_kernel(query: Any, pages: Any) -> Any:
        found = attend_to_pages(
            query, positions, pages, jnp.asarray(1), table, first, sizes=sizes, offset=0, page_size=slots,
            window=window, scoring=scoring, is_latent=is_latent, is_interpreted=jax.default_backend() == "cpu",
        )  # fmt: skip
        return found.product / found.sums[..., None]

    @jax.jit
    def by_gather(query: Any, wide: Any) -> Any:
        key, value, distance = read_pages(
            wide, jnp.asarray(1), table, first, positions, sizes=sizes, slots=(), dtype=jnp.float32
        )
        key, value = (jnp.concatenate([key, value], axis=-1), key) if is_latent else (key, value)
        wanted = jnp.einsum("bskgh,bkth->bskgt", query.astype(jnp.float32), key, precision="highest")
        scores = wanted / scoring.divisor
        scores = scores if not softcap else softcap * jnp.tanh(scores / softcap)
        visible = (distance >= 0) & (distance < (window or 10**6))
        weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bskgt,bkth->bskgh", weights, value, precision="highest")

    wanted = by_gather(query, wide)
    return float(jnp.max(jnp.abs(by_kernel(query, pages) - wanted)) / jnp.max(jnp.abs(wanted)))


def line(row: Row) -> str:
    """A row in words."""
    if "error" in row:
        return f"{row['row']:28}{row['error']}"
    times = "".join(f"{1000 * row[name]:9.2f} ms" for name in ("predicted_seconds", "seconds", "dispatched_seconds"))
    shares = f"{row['ratio']:6.2f}{row['hbm_share']:8.0%}{row['tokens_per_second']:12,.0f}"
    kernels = f"{row['num_kernels']:9.0f}" if "num_kernels" in row else ""
    return f"{row['row']:28}{times}{shares}{kernels}"


def kept() -> Iterator[Row]:
    """The rows that are kept of a measurement, with what is planned for them."""
    measured = json.loads((Path(__file__).parents[1] / "tests/data/measured_h200.json").read_text())
    for row in measured["decode"]:
        serving, plan = planned(row["row"], f"{measured['chip']}:1")
        yield {
            **row,
            "seconds": row["waited_seconds"],
            **figures_of(plan, serving.batch, row["seconds"]),
        }


def planned(name: str, on: str) -> tuple[Any, Any]:
    """The decode step of a row's name, and its plan on one GPU."""
    from meshwright.description.families.registry import PRESETS
    from meshwright.description.hardware.system import parse_system
    from meshwright.description.step.serving import Serving, ServingLayout
    from meshwright.mesh import MeshShape
    from meshwright.planning.serving.plan import make_serving_plan

    title, size, *dtypes = name.split()
    weight_dtype, kv_dtype = (*dtypes, "bf16", "bf16")[:2]
    title, _, layers = title.partition(":")
    model = PRESETS[title]
    model = replace(model, num_layers=int(layers)) if layers else model
    batch, context = map(int, size.split("x"))
    serving = Serving(
        model=model, prompt_len=context - 64, output_len=64, batch=batch, weight_dtype=weight_dtype, kv_dtype=kv_dtype
    )
    return serving, make_serving_plan(serving, ServingLayout(MeshShape()), parse_system(on))


def figures_of(plan: Any, batch: int, dispatched: float) -> Row:
    """The figures of a row, from a plan and the seconds of a step."""
    memory = plan.predicted.memory_bytes
    return {
        "predicted_seconds": plan.seconds,
        "dispatched_seconds": dispatched,
        "ratio": plan.seconds / dispatched,
        "hbm_share": (memory["weights"] + memory["cache"]) / dispatched / plan.system.hbm_bytes_per_second,
        "tokens_per_second": batch / dispatched,
    }


def measure(name: str, steps: int, on: str | None) -> list[Row]:
    """The row of one model."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.description.step.serve import table_entries
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.mesh import MeshShape
    from meshwright.serving.engine.lowered import lower_engine_step
    from meshwright.serving.engine.programs import FROM_LAST, Columns, Shape

    serving, plan = planned(name, f"{on}:1" if on else str(here()))
    batch, context = serving.batch, serving.prompt_len + serving.output_len
    lowered = lower_engine_step(build_mesh(MeshShape()), serving=asdict(serving), cache="heads")
    compiled = lowered.compile()
    (params, pages, last, numbers, _), _ = lowered.args_info

    @partial(jax.jit, static_argnames=("shape", "dtype"))
    def draw(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.bits(key, shape, f"uint{8 * dtype.itemsize}").astype(dtype)
        return (0.02 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)

    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def drawn(path: Any, leaf: Any) -> Any:
        """The residual stream is mostly the token's own embedding, so that experts are chosen evenly."""
        words = jax.tree_util.keystr(path)
        if "norm" in words or "bias" in words:
            return jnp.full(leaf.shape, "norm" in words, leaf.dtype)
        return draw(next(keys), leaf.shape, leaf.dtype) * (500 if words == "['embedding']" else 1)

    params, pages = (jax.tree.map_with_path(drawn, tree) for tree in (params, pages))
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
    kernels = traced_kernels(lambda: [jax.block_until_ready(step()) for _ in range(TRACED_STEPS)])
    row = {
        "row": name,
        "device": jax.devices()[0].device_kind,
        "seconds": statistics.median(times[2:]),
        **figures_of(plan, batch, dispatched),
        "num_kernels": sum(count for count, _ in kernels.values()) / TRACED_STEPS,
        "kernels": kernels,
        "memory": plan.predicted.memory_bytes,
        "breakdown_seconds": dict(plan.predicted.breakdown_seconds),
        "memory_measured": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    return [row]


if __name__ == "__main__":
    main()
