"""What a train step costs beside its products alone: CPU-seconds on 8 simulated devices, mesh by mesh.

    .venv/bin/python benchmarks/train_step.py [--meshes 1,8,1,1 2,2,2,1] [--steps 6] [--watched] [--json]

A Llama of 13.8M parameters in float32, whole blocks made again in backward, 8 sequences of 256 tokens. The floor is
8 flops a parameter and token (2 forward, 2 again, 4 backward: 226 GFLOP, attention's own left out) at the rate that
this machine multiplies square float32 matrices, the median of a measurement beside each row. CPU-seconds are the
process's, so that they hold on a shared machine; wall seconds are told beside them. About a minute a mesh on two cores.

Rows more are there to compare with. The same step in plain JAX (`naive_step.py`), over 8 devices and on one. And the
products alone that a step on 1,8,1,1 makes: each device's, in programs that hold nothing else. These are 198 GFLOP: a
lookup takes no product, logits and the last product of a block are not made again, and attention has its own, but for
the quarter of its scores that no query sees.

--watched: instead, the first mesh's step alone beside the same step in the loop of a run, with everything that the loop
does around it (rows, metrics.jsonl, TensorBoard's events, the line against the plan), one of each in turn; and what the
loop takes of its own, around a step of one device that does next to nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from naive_step import naive_step

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.step import initial_state, train_step
from meshwright.execution.training.stepping import take_steps
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.watch.log import RunLog
from meshwright.execution.training.watch.shortfall import Shortfall
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.record import Record

MODEL = ModelConfig(
    name="llama-14m", num_layers=6, embed=384, mlp=1024, num_heads=8, num_kv_heads=8, head_dim=48, vocab=4096
)
WORKLOAD = Workload(model=MODEL, batch=8, seq_len=256, compute_dtype="f32")
MESHES = ("1,8,1,1", "2,2,2,1", "1,2,2,2")

PRODUCTS = (
    # Of each layer: a projection forward and again, the gradients of what it reads and of itself.
    (6 * 4 * 2, "td,dn->tn", (256, 384), (384, 384)),
    (6 * 4, "tn,dn->td", (256, 384), (384, 384)),
    (6 * 4, "td,tn->dn", (256, 384), (256, 384)),
    # Gate and up, forward and again, and what down's input is given back; gradients of what they read, and down itself,
    # which is not made again; gradients of all three.
    (6 * 5, "td,df->tf", (256, 384), (384, 1024)),
    (6 * 3, "tf,df->td", (256, 1024), (384, 1024)),
    (6 * 3, "td,tf->df", (256, 384), (256, 1024)),
    # Of both halves of the queries, with the keys up to their end: scores forward and again, and their gradients; what
    # they mix forward and again, and the gradients of queries; those of keys and of values.
    *(
        product
        for keys in (128, 256)
        for product in (
            (6 * 3, "ksh,kht->kst", (8, 128, 48), (8, 48, keys)),
            (6 * 3, "kst,kth->ksh", (8, 128, keys), (8, keys, 48)),
            (6 * 2, "khs,kst->kht", (8, 48, 128), (8, 128, keys)),
        )
    ),
    # Logits.
    (1, "td,dv->tv", (256, 384), (384, 4096)),
    (1, "tv,dv->td", (256, 4096), (384, 4096)),
    (1, "td,tv->dv", (256, 384), (256, 4096)),
)
"""The products of one of 8 devices that share a batch: how often a step makes them, and the shapes of both operands."""

PRODUCTS_AT_ONCE = 4
"""How many products, of operands of their own, a program makes that is timed: calling one takes time too."""

COMPILED: list[str] = []
"""An entry for every program that JAX compiled in this process."""


def note_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    """Keep count of compilations."""
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="*", default=list(MESHES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # As `meshwright train --hardware cpu:8` does: the flags of XLA, and what malloc does with freed memory.
    claim_devices(parse_system("cpu:8"))
    if args.watched:
        print_watched(parse_mesh(args.meshes[0], num_devices=8), args.steps)
        return
    rows = [measure(parse_mesh(text, num_devices=8), args.steps) for text in args.meshes]
    rows += [measure_naive(8, args.steps), measure_naive(1, args.steps), measure_products()]
    rows = beside_floor(rows)
    if args.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    print(f"{'mesh':<24}{'CPU s':>8}{'wall s':>8}{'cores':>7}{'floor':>8}{'of floor':>10}")
    for row in rows:
        seconds, wall, floor = row["cpu_seconds"], row["wall_seconds"], row["floor_cpu_seconds"]
        print(f"{row['mesh']:<24}{seconds:>8.2f}{wall:>8.2f}{seconds / wall:>7.2f}{floor:>8.2f}{floor / seconds:>9.1%}")


def measure(shape: MeshShape, steps: int) -> dict[str, Any]:
    """The row of one mesh."""
    mesh, layout, optimizer = build_mesh(shape), ShardingContext(shape), Optimizer()
    text = tokens()
    with jax.set_mesh(mesh):
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
        state = initial_state(WORKLOAD, layout, optimizer, mesh, seed=0)
        update = train_step(WORKLOAD, layout, optimizer)

        def step() -> None:
            nonlocal state
            state, _ = jax.block_until_ready(update(state, batch))

        seconds = seconds_of(step, steps)
    return row(str(shape), *seconds)


def print_watched(shape: MeshShape, steps: int) -> None:
    """Print what the loop of a run adds to a step, and its own time."""
    mesh, layout, optimizer = build_mesh(shape), ShardingContext(shape), Optimizer()
    text = tokens()
    with jax.set_mesh(mesh):
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
        state = initial_state(WORKLOAD, layout, optimizer, mesh, seed=0)
        program = StepProgram(train_step(WORKLOAD, layout, optimizer), print)
        state, _ = jax.block_until_ready(program(state, batch))
        plain, watched = [], []
        for _ in range(3):  # In turn, for the machine is shared.
            for _ in range(steps):
                began = time.perf_counter()
                state, _ = jax.block_until_ready(program(state, batch))
                plain.append(time.perf_counter() - began)
            seconds, state = watched_steps(program, batch, state, steps, shape)
            watched.append(seconds)
    alone, beside = statistics.median(plain), statistics.median(watched)
    print(f"a step alone {1000 * alone:.1f} ms, in the loop of a run {1000 * beside:.1f} ms: {beside / alone:.3f}")

    step = jax.jit(lambda state, batch: ({"x": state["x"] + 1.0}, {"loss": state["x"], "grad_norm": state["x"]}))
    program = StepProgram(step, print)
    first: Any = {"x": jnp.float32(0)}
    first, _ = program(first, {})
    seconds, _ = watched_steps(program, {}, first, 300, MeshShape())
    print(f"the loop's own: {1000 * seconds:.2f} ms a step, {seconds / 0.25:.2%} of one of 250 ms")


def watched_steps(program: StepProgram, batch: Any, state: Any, steps: int, shape: MeshShape) -> tuple[float, Any]:
    """The wall seconds of a step in the loop of a run, and the state after so many."""
    config = RunConfig(workload=WORKLOAD, mesh=shape, hardware="cpu:8", optimizer=Optimizer(), steps=steps)
    shortfall = Shortfall(1.0, is_simulated=True)

    class Same:
        def __getitem__(self, step: int) -> Any:
            return batch

    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), print) as log:
        log.begin(0, Record(origin="compiled", mesh={}, hardware="cpu:8"))
        began = time.perf_counter()
        found = take_steps(program, Same(), state, range(steps), needs_state=lambda step: False, runs_ahead=False)
        for row, after in found:
            state = after
            row |= {"mesh": str(shape), "hardware": "cpu:8", "learning_rate": config.optimizer.rate(row["step"])}
            log.add(row)
            shortfall.add(row)
        seconds = time.perf_counter() - began
    return seconds / steps, state


def measure_naive(num_devices: int, steps: int) -> dict[str, Any]:
    """The row of the same step in plain JAX."""
    return row(
        f"naive, {num_devices} device{'s' * (num_devices > 1)}",
        *seconds_of(naive_step(MODEL, tokens(), num_devices), steps),
    )


def measure_products() -> dict[str, Any]:
    """The row of the products alone."""
    times = [(count, seconds_of_product(letters, *shapes, num_devices=8)) for count, letters, *shapes in PRODUCTS]
    cpu, wall = (8 * sum(count * seconds[clock] for count, seconds in times) for clock in (0, 1))
    return row("products alone", cpu, wall)


def tokens() -> np.ndarray:
    """The text of every step, at random."""
    return np.random.default_rng(0).integers(0, MODEL.vocab, (WORKLOAD.batch, WORKLOAD.seq_len + 1))


def row(name: str, cpu: float, wall: float) -> dict[str, Any]:
    """A row of the table, with the floor as the machine is now."""
    seconds, _ = seconds_of_product("ij,jk->ik", (1024, 1024), (1024, 1024), num_devices=1)
    floor = 8 * num_parameters(MODEL) * WORKLOAD.tokens * seconds / (2 * 1024**3)
    return {"mesh": name, "cpu_seconds": cpu, "wall_seconds": wall, "floor_cpu_seconds": floor}


def beside_floor(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the share of each that the floor is; their floor is the median of all, as one is soon disturbed."""
    floor = statistics.median(row["floor_cpu_seconds"] for row in rows)
    return [row | {"floor_cpu_seconds": floor, "floor_fraction": floor / row["cpu_seconds"]} for row in rows]


def seconds_of_product(letters: str, *shapes: tuple[int, ...], num_devices: int) -> tuple[float, float]:
    """The CPU-seconds and wall seconds of a float32 product, one of several that as many devices make at once."""
    lying = NamedSharding(jax.make_mesh((num_devices,), ("copies",), devices=jax.devices()[:num_devices]), P())
    pairs = [[np.full(shape, number, np.float32) for shape in shapes] for number in range(PRODUCTS_AT_ONCE)]
    pairs = jax.device_put(pairs, lying)
    products = jax.jit(lambda pairs: [jnp.einsum(letters, *pair) for pair in pairs])
    cpu, wall = seconds_of(lambda: jax.block_until_ready(products(pairs)), 7)
    made = PRODUCTS_AT_ONCE * num_devices
    return cpu / made, wall / made


def seconds_of(run: Callable[[], Any], times: int) -> tuple[float, float]:
    """The CPU-seconds and wall seconds of a run, the median of several after the first; none of them may compile."""
    run()
    before, seconds = len(COMPILED), []
    for _ in range(times):
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
    if len(COMPILED) > before:
        raise SystemExit(f"{len(COMPILED) - before} programs were compiled after the first run")
    cpu, wall = (statistics.median(each) for each in zip(*seconds, strict=True))
    return cpu, wall


if __name__ == "__main__":
    main()
