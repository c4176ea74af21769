"""Ways to keep parameters and moments, and a start that no mesh changes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.run import RunConfig, read_config
from meshwright.execution.training.step import abstract_state, initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

MODEL = replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1)
WORKLOAD = Workload(model=MODEL, batch=8, seq_len=16, compute_dtype="f32")
OPTIMIZER = Optimizer(warmup_steps=1, decay_steps=4, first_rate=0.0)


def started(shape, workload=WORKLOAD, strategy=DEFAULT):
    """A mesh, a layout and the state that training starts from."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape)
    with jax.set_mesh(mesh):
        return mesh, layout, initial_state(workload, layout, OPTIMIZER, mesh, strategy, seed=3)


def after(num_steps, shape, workload=WORKLOAD, strategy=DEFAULT):
    """The losses of some steps on one batch and the state after them."""
    mesh, layout, state = started(shape, workload, strategy)
    text = np.random.default_rng(0).integers(0, MODEL.vocab, (8, 17))
    with jax.set_mesh(mesh):
        place, losses = layout.spec("batch", "sequence"), []
        batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
        step = train_step(workload, layout, OPTIMIZER, strategy)
        for _ in range(num_steps):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    return losses, state


def test_parameters_start_bit_equal_on_meshes_of_1_2_4_and_8_devices():
    shapes = MeshShape(), MeshShape(fsdp=2), MeshShape(dp=2, tp=2), MeshShape(fsdp=2, tp=2, sp=2)
    one, *others = (jax.tree.map(np.asarray, started(shape)[2]["params"]) for shape in shapes)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, one, other)


KEPT = [
    (replace(WORKLOAD, param_dtype="bf16"), Strategy(master_weights=True)),
    pytest.param(WORKLOAD, Strategy(moment_dtype="bf16"), marks=pytest.mark.matrix),
    pytest.param(WORKLOAD, Strategy(optimizer="adafactor"), marks=pytest.mark.matrix),
    pytest.param(WORKLOAD, Strategy(optimizer="lion", moment_dtype="bf16"), marks=pytest.mark.matrix),
]


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "strategy"), KEPT)
def test_a_state_begins_as_a_step_leaves_it(workload, strategy):
    """So that the second step is the program of the first, and a checkpoint is read back as it was written."""
    shape = MeshShape(fsdp=2, tp=2)
    mesh, layout, state = started(shape, workload, strategy)
    with jax.set_mesh(mesh):
        wanted = abstract_state(workload, layout, OPTIMIZER, mesh, strategy)
    _, left = after(1, shape, workload, strategy)
    for one, other, third in zip(*map(jax.tree.leaves, (state, left, wanted)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) == (third.shape, third.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert one.sharding.is_equivalent_to(third.sharding, one.ndim)


def test_parameters_are_their_float32_copies_narrowed():
    workload, strategy = replace(WORKLOAD, param_dtype="bf16"), Strategy(master_weights=True)
    losses, state = after(3, MeshShape(fsdp=2), workload, strategy)
    for narrow, wide in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(state["master"]), strict=True):
        assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    assert losses[2] < losses[0]


def test_moments_in_bf16_end_near_those_in_float32():
    losses, state = after(3, MeshShape(fsdp=2), strategy=Strategy(moment_dtype="bf16"))
    wanted, _ = after(3, MeshShape(fsdp=2))
    assert {leaf.dtype for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim} == {jnp.dtype(jnp.bfloat16)}
    assert losses == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "strategy", "said"),
    [
        (MeshShape(), Strategy(optimizer="adamw-8bit"), "optimizer adamw-8bit can be planned"),
        (MeshShape(pp=2), Strategy(zero_stage=2), "which is ZeRO-1; use zero_stage 1, or 3"),
    ],
)
def test_a_way_that_does_not_run_is_told(mesh, strategy, said):
    with pytest.raises(MeshwrightError, match=said):
        check_runnable(PRESETS["tiny"], mesh, strategy)


@pytest.mark.slow
def test_a_run_keeps_its_way_and_resumes_in_it(tmp_path):
    strategy = Strategy(num_microbatches=2, zero_stage=2, optimizer="lion")
    config = RunConfig(
        workload=WORKLOAD, mesh=MeshShape(dp=2, fsdp=2, tp=2), hardware="cpu:8", optimizer=OPTIMIZER, steps=2
    )
    config = replace(config, strategy=strategy)
    train(config, tmp_path)
    assert read_config(tmp_path).strategy == strategy
    train(replace(config, steps=3), tmp_path)
