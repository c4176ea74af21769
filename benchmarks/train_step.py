"""What a train step costs beside its products alone: CPU-seconds on 8 simulated devices, mesh by mesh.

    .venv/bin/python benchmarks/train_step.py [--meshes 1,8,1,1 2,2,2,1] [--steps 6] [--json]

A Llama of 13.8M parameters in float32, whole blocks made again in backward, 8 sequences of 256 tokens. The floor is
8 flops a parameter and token (2 forward, 2 again, 4 backward: 226 GFLOP, attention's own left out) at the rate that
this machine multiplies float32 matrices of the step's sizes in the same minute. CPU-seconds are the process's, so that
they hold on a shared machine; wall seconds are told beside them. About a minute a mesh on two cores.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.cli.devices import claim_devices
from meshwright.hardware import parse_system
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.parallel import Layout, build_mesh
from meshwright.training import Optimizer, initial_state, train_step
from meshwright.workload import ModelConfig, Workload, num_parameters

MODEL = ModelConfig(
    name="llama-14m", num_layers=6, embed=384, mlp=1024, num_heads=8, num_kv_heads=8, head_dim=48, vocab=4096
)
WORKLOAD = Workload(model=MODEL, batch=8, seq_len=256, compute_dtype="f32")
MESHES = ("1,8,1,1", "2,2,2,1", "1,2,2,2")

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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # As `meshwright train --hardware cpu:8` does: the flags of XLA, and what malloc does with freed memory.
    claim_devices(parse_system("cpu:8"))
    rows = [measure(parse_mesh(text, num_devices=8), args.steps) for text in args.meshes]
    if args.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    print(f"{'mesh':<24}{'CPU s':>8}{'wall s':>8}{'cores':>7}{'floor':>8}{'of floor':>10}")
    for row in rows:
        seconds, wall, floor = row["cpu_seconds"], row["wall_seconds"], row["floor_cpu_seconds"]
        print(f"{row['mesh']:<24}{seconds:>8.2f}{wall:>8.2f}{seconds / wall:>7.2f}{floor:>8.2f}{floor / seconds:>9.1%}")


def measure(shape: MeshShape, steps: int) -> dict[str, Any]:
    """The row of one mesh: the median of its steps after the first, none of which may compile."""
    mesh, layout, optimizer = build_mesh(shape), Layout(shape), Optimizer()
    text = np.random.default_rng(0).integers(0, MODEL.vocab, (WORKLOAD.batch, WORKLOAD.seq_len + 1))
    with jax.set_mesh(mesh):
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
        state = initial_state(WORKLOAD, layout, optimizer, mesh, seed=0)
        step = train_step(WORKLOAD, layout, optimizer)
        state, _ = jax.block_until_ready(step(state, batch))
        before, seconds = len(COMPILED), []
        for _ in range(steps):
            cpu, wall = time.process_time(), time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
    if len(COMPILED) > before:
        raise SystemExit(f"{len(COMPILED) - before} programs were compiled after the first step of {shape}")
    cpu, wall = (statistics.median(times) for times in zip(*seconds, strict=True))
    floor = 8 * num_parameters(MODEL) * WORKLOAD.tokens / flops_per_cpu_second()
    found = {"cpu_seconds": cpu, "wall_seconds": wall, "floor_cpu_seconds": floor, "floor_fraction": floor / cpu}
    return {"mesh": str(shape)} | found


def flops_per_cpu_second(size: int = 1024, runs: int = 15) -> float:
    """The rate of a square float32 product on one device, the median of several runs."""
    x = jnp.ones((size, size), jnp.float32)
    product, seconds = jax.jit(jnp.dot), []
    jax.block_until_ready(product(x, x))
    for _ in range(runs):
        began = time.process_time()
        jax.block_until_ready([product(x, x) for _ in range(4)])
        seconds.append(time.process_time() - began)
    return 4 * 2 * size**3 / statistics.median(seconds)


if __name__ == "__main__":
    main()
