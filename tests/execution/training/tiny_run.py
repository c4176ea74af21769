"""A run so small that a test takes its steps in seconds."""

from dataclasses import replace

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

CONFIG = RunConfig(
    workload=Workload(
        model=replace(PRESETS["tiny"], embed=16, mlp=16, num_layers=1), batch=8, seq_len=16, compute_dtype="f32"
    ),
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    memory_headroom=0.1,
    optimizer=Optimizer(warmup_steps=2, decay_steps=40),
    steps=6,
)
