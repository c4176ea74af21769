"""What a step is given to keep: as the plan has it, to the byte, for every optimizer and every dtype that runs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training import step
from meshwright.execution.training.step import abstract_batch, abstract_state, initial_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.planning.cost.arguments import argument_bytes

MODEL = replace(PRESETS["tiny"], embed=128, mlp=256, num_heads=4, num_kv_heads=2, head_dim=32)
F32 = Workload(model=MODEL, batch=8, seq_len=16)
BF16 = replace(F32, param_dtype="bf16")
SPLIT = MeshShape(dp=2, fsdp=2, tp=2)

KEPT = [
    (F32, SPLIT, DEFAULT),
    (F32, MeshShape(), DEFAULT),
    (F32, SPLIT, Strategy(zero_stage=0)),
    (F32, MeshShape(fsdp=4, sp=2), Strategy(zero_stage=1)),
    (F32, MeshShape(fsdp=4, sp=2), Strategy(zero_stage=2, moment_dtype="bf16")),
    (F32, SPLIT, Strategy(moment_dtype="bf16")),
    (F32, SPLIT, Strategy(dropout=0.1)),
    (F32, MeshShape(fsdp=2, sp=2), Strategy(attention="flash", sp_method="ring", dropout=0.1)),
    (BF16, SPLIT, DEFAULT),
    (BF16, SPLIT, Strategy(master_weights=True)),
    (BF16, SPLIT, Strategy(master_weights=True, moment_dtype="bf16", zero_stage=0)),
    (F32, SPLIT, Strategy(optimizer="lion")),
    (BF16, SPLIT, Strategy(optimizer="lion", moment_dtype="f32")),
    (F32, SPLIT, Strategy(optimizer="sgd")),
    (F32, MeshShape(fsdp=8), Strategy(optimizer="sgd", zero_stage=1)),
    (F32, SPLIT, Strategy(optimizer="adafactor")),
    (F32, SPLIT, Strategy(optimizer="adafactor", zero_stage=0)),
    (BF16, MeshShape(fsdp=4, tp=2), Strategy(optimizer="adafactor", master_weights=True)),
    (replace(F32, model=replace(MODEL, embed=64)), SPLIT, Strategy(optimizer="adafactor", moment_dtype="bf16")),
]


@pytest.mark.parametrize(("workload", "shape", "strategy"), KEPT)
def test_a_steps_arguments_are_the_planned_bytes(workload, shape, strategy):
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape, rules_of(strategy))
    with jax.set_mesh(mesh):
        state = abstract_state(workload, layout, Optimizer(), mesh, strategy)
        given = jax.tree.leaves((state, abstract_batch(workload, layout, mesh, strategy)))
    kept = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in given)
    assert argument_bytes(workload, shape, strategy) == kept


def test_gradients_of_tables_in_a_tpus_order_change_no_value(monkeypatch):
    """A device's part of the table, [256, 16], needs less padding with its rows innermost; TPUs store it so."""
    workload, shape = replace(F32, model=replace(MODEL, num_layers=1)), MeshShape(fsdp=8)
    mesh, layout = build_mesh(shape), ShardingContext(shape, rules_of(DEFAULT))
    tokens = np.arange(8 * 17).reshape(8, 17) % 256
    batch = {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
    updated, constraints = [], []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(step, "mesh_platform", lambda platform=platform: platform)
        with jax.set_mesh(mesh):
            state = initial_state(workload, layout, Optimizer(), mesh, seed=0)
            lowered = step.train_step(workload, layout, Optimizer()).lower(state, batch)
            updated.append(jax.device_get(lowered.compile()(state, batch)[0]))
            constraints.append(lowered.as_text().count("result_layouts = [dense<[0, 1]>"))
    assert constraints == [0, 1]
    jax.tree.map(np.testing.assert_array_equal, *updated)
