"""Kill a training at random moments, while it saves too, and hold what comes out to the same run unbroken.

    .venv/bin/python benchmarks/kill_runs.py [--kills 50] [--seed 0] [--json]

A run of a tiny model on 4 simulated devices that saves every second step is started again and again, and killed:
while it starts, some time after a step, or up to 30 ms after a checkpoint began to be written. After each kill every
checkpoint that has a name must be whole, and every line of metrics must have the loss of the unbroken run, to the bit.
In the end the run is let finish, and its parameters and moments must be those of the unbroken run, to the bit.
Processes are forked after the imports and find compiled programs in a cache: a kill takes a few seconds.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import abstract_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.support.checksums import find_damage

STEPS = 200
CONFIG = RunConfig(
    workload=Workload(
        model=replace(PRESETS["tiny"], embed=16, mlp=16, num_layers=1), batch=4, seq_len=16, compute_dtype="f32"
    ),
    mesh=MeshShape(fsdp=4),
    hardware="cpu:4",
    optimizer=Optimizer(warmup_steps=2, decay_steps=STEPS),
    steps=STEPS,
    saving=Saving(every=2, keep=1, keep_every=50),
)
MOMENTS = ("starting", "training", "saving")
MOST_SECONDS = 120.0


def in_child(cache: Path, work: Callable[[], None]) -> int:
    """The process id of a child that does some work with JAX."""
    if (process := os.fork()) != 0:
        return process
    code = 1
    try:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        claim_devices(CONFIG.system)
        work()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def train(directory: Path, notes: Path) -> None:
    """Train to the end, each note a line of a file."""
    with notes.open("a") as file:
        run_steps(CONFIG, directory, on_note=lambda line: print(line, file=file, flush=True))


def wait(process: int) -> None:
    """Wait for a child; raise where it failed."""
    if (code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])) != 0:
        raise SystemExit(f"a training ended with exit code {code}")


def kill(process: int, directory: Path, moment: str, rng: random.Random) -> None:
    """Kill a training at a moment; one that ends before has finished."""
    rows, until = num_rows(directory), time.monotonic() + MOST_SECONDS
    if moment == "starting":
        delay = rng.uniform(0.0, 1.5)
    else:
        saves = directory / "checkpoints"
        is_there: Callable[[], bool] = (
            (lambda: num_rows(directory) > rows)
            if moment == "training"
            else (lambda: any(saves.glob("*.partial*")) and num_rows(directory) > rows)
        )
        while not is_there() and time.monotonic() < until:
            time.sleep(0.0005)
        delay = rng.uniform(0.0, 0.3 if moment == "training" else 0.03)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def num_rows(directory: Path) -> int:
    """The lines of metrics; -1 where they are written anew at this moment."""
    try:
        return (directory / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return -1


def check(directory: Path, losses: list[float]) -> int:
    """Raise where a named checkpoint is not whole or a loss is another; the last checkpoint."""
    names = [path.name for path in (directory / "checkpoints").glob("*")]
    steps = sorted(int(name) for name in names if name.isdigit())
    for step in steps:
        if damage := find_damage(directory / "checkpoints" / str(step)):
            raise SystemExit(f"checkpoint {step} is not whole: {damage}")
    for row in read_metrics(directory):
        if row["loss"] != losses[row["step"]]:
            raise SystemExit(f"step {row['step']}: loss {row['loss']!r}, and {losses[row['step']]!r} unbroken")
    return steps[-1] if steps else 0


def compare(one: Path, other: Path) -> None:
    """Raise where the last states of two runs differ in a bit."""
    mesh = build_mesh(CONFIG.mesh)
    with jax.set_mesh(mesh):
        wanted = abstract_state(CONFIG.workload, ShardingContext(CONFIG.mesh), CONFIG.optimizer, mesh)
        states = [Checkpoints(path).restore(STEPS, wanted) for path in (one, other)]
    for (path, a), b in zip(jax.tree.leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        if not np.array_equal(np.asarray(a), np.asarray(b)):
            raise SystemExit(f"{jax.tree_util.keystr(path)} differs after {STEPS} steps")


def main() -> None:
    """Kill, check, and print how often and when."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng, began, moments, left = random.Random(args.seed), time.monotonic(), collections.Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        unbroken, broken, notes = root / "unbroken", root / "broken", root / "notes"
        wait(in_child(root / "cache", lambda: train(unbroken, notes)))
        losses = [row["loss"] for row in read_metrics(unbroken)]
        last = 0
        for number in range(args.kills):
            moment = rng.choices(MOMENTS, (1, 2, 3))[0]
            kill(in_child(root / "cache", lambda: train(broken, notes)), broken, moment, rng)
            left += any((broken / "checkpoints").glob("*.partial*"))
            last = check(broken, losses)
            moments[moment] += 1
            if not args.json:
                print(f"kill {number + 1:>3} while {moment:<8}  checkpoint {last}", flush=True)
        wait(in_child(root / "cache", lambda: train(broken, notes)))
        check(broken, losses)
        wait(in_child(root / "cache", lambda: compare(unbroken, broken)))
        said = notes.read_text()
    found = {
        "kills": args.kills,
        **moments,
        "left_in_part": left,
        "goes_on_notes": said.count("continues from checkpoint"),
        "damaged": said.count("is damaged"),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(found) if args.json else f"bit-equal to the unbroken run: {found}")


if __name__ == "__main__":
    main()
