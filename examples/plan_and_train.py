"""Plan a tiny model on 8 simulated devices, prove the plan, train on it.

XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu .venv/bin/python examples/plan_and_train.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.families import load_model
from meshwright.hardware import parse_system
from meshwright.mesh import parse_mesh
from meshwright.planner import make_plan, rank
from meshwright.step import Workload
from meshwright.training import Optimizer, RunConfig, train
from meshwright.verification import verify


def main() -> None:
    system = parse_system("cpu:8")
    workload = Workload(model=load_model("tiny"), batch=16, seq_len=64, compute_dtype="f32")

    best = rank(workload, system).plans[0]
    print(f"best mesh: {best.mesh}")

    plan = make_plan(workload, parse_mesh("1,2,4,1", num_devices=8), system)
    rows = verify(plan).rows
    print(f"{sum(row.is_equal for row in rows)} of {len(rows)} quantities are compiled as predicted")

    config = RunConfig(
        workload=workload, mesh=plan.mesh, hardware="cpu:8", optimizer=Optimizer(decay_steps=20), steps=20
    )
    with TemporaryDirectory() as directory:
        train(config, Path(directory), on_step=lambda row: print(f"step {row['step']:>2}  loss {row['loss']:.3f}"))


if __name__ == "__main__":
    main()
