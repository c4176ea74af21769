"""What a resumed run holds while it reads its state, beside what training holds: the process's memory over the state's.

    .venv/bin/python benchmarks/restore_memory.py [--json]

A model of 55 million parameters with AdamW in float32 (12 bytes a parameter) on one simulated device, whose memory is
the process's. One process trains two steps; another reads the state that it saved. Each figure is the most memory of
a process (getrusage), less what it had before it made any array, over the bytes of the state.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.restart import first_state
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.step import abstract_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

CONFIG = RunConfig(
    workload=Workload(
        model=replace(PRESETS["tiny"], embed=768, mlp=3072, num_layers=6), batch=2, seq_len=64, compute_dtype="f32"
    ),
    mesh=MeshShape(),
    hardware="cpu:1",
    optimizer=Optimizer(),
    steps=2,
)


def peak_bytes() -> int:
    """The most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(directory: Path) -> dict[str, float]:
    """Train, or read a state and train on; the most memory of each over the state's bytes."""
    claim_devices(CONFIG.system)
    mesh, layout = build_mesh(CONFIG.mesh), ShardingContext(CONFIG.mesh)
    with jax.set_mesh(mesh):
        wanted = abstract_state(CONFIG.workload, layout, CONFIG.optimizer, mesh)
        size, before = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(wanted)), peak_bytes()
        found = {"state_bytes": float(size)}
        checkpoints = Checkpoints(directory)
        if (start := checkpoints.latest) is not None:
            jax.block_until_ready(first_state(CONFIG, layout, mesh, checkpoints, start, lambda _: None))
            found["restore"] = (peak_bytes() - before) / size
    if start is None:
        run_steps(CONFIG, directory)
        found["training"] = (peak_bytes() - before) / size
    return found


def main() -> None:
    """Measure in processes of their own, and print both beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args.child)))
        return
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(2):
            command = [sys.executable, __file__, "--child", str(Path(name) / "run")]
            found |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"state {found['state_bytes'] / 1e6:.0f} MB; most memory over it: training {found['training']:.2f} (saving"
        f" included), restoring {found['restore']:.2f}"
    )


if __name__ == "__main__":
    main()
