"""Layers in the slots of a pipeline: drawn, kept and read as on one device, whatever the stages."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.model import Experts
from meshwright.description.step.parameter_tree import leaves
from meshwright.description.step.passes.schedule import slot_layers
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.slots import in_order, to_order, to_stage_layout
from meshwright.execution.training.step import abstract_state, initial_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

MODEL = replace(PRESETS["tiny"], num_layers=5, embed=32, mlp=32, num_heads=2, num_kv_heads=2, head_dim=8)
CYCLES = replace(MODEL, num_layers=10, experts=Experts(count=4, num_active=2, mlp=16, layers=(False, True)))
"""With experts in every second layer: five cycles of two layers."""

MODELS = {"layers": MODEL, "cycles": CYCLES}
OPTIMIZER = Optimizer(warmup_steps=1, decay_steps=10, first_rate=0.0)
INTERLEAVED = Strategy(num_microbatches=4, virtual_stages=2)

STAGES = [
    ("layers", MeshShape(pp=2), Strategy(num_microbatches=4)),
    ("layers", MeshShape(pp=2, fsdp=2), INTERLEAVED),
    ("layers", MeshShape(pp=4, tp=2), Strategy(num_microbatches=4, schedule="gpipe")),
    ("cycles", MeshShape(pp=2, ep=2), INTERLEAVED),
]


def workload(model):
    """Steps of a model of `MODELS`."""
    return Workload(model=MODELS[model], batch=8, seq_len=8, compute_dtype="f32")


@cache
def drawn(model, shape, strategy):
    """The first state on a mesh, and what lies it there."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape, rules_of(strategy))
    with jax.set_mesh(mesh):
        return initial_state(workload(model), layout, OPTIMIZER, mesh, strategy, seed=0), mesh, layout


def alone(model):
    """The parameters of the first state on one device."""
    return jax.tree.map(np.asarray, drawn(model, MeshShape(), Strategy())[0]["params"])


@pytest.mark.parametrize(("model", "shape", "strategy"), STAGES)
def test_what_is_drawn_does_not_depend_on_the_stages(model, shape, strategy):
    state, _, _ = drawn(model, shape, strategy)
    order = slot_layers(5, shape.pp, strategy.virtual_stages)
    for (path, whole), (_, staged) in zip(leaves(alone(model)), leaves(state["params"]), strict=True):
        staged = np.asarray(staged)
        if not path.startswith("layers"):
            assert np.array_equal(staged, whole), path
            continue
        assert staged.shape[0] == len(order)
        for slot, layer in enumerate(order):
            assert np.array_equal(staged[slot], np.zeros_like(whole[0]) if layer is None else whole[layer]), path


@pytest.mark.parametrize(("model", "shape", "strategy"), STAGES)
def test_a_state_in_order_is_that_of_one_device_and_comes_back(model, shape, strategy):
    state, mesh, layout = drawn(model, shape, strategy)
    work = workload(model)
    lies = in_order(layout, work.config, strategy)
    with jax.set_mesh(mesh):
        wanted, slotted = (abstract_state(work, one, OPTIMIZER, mesh, strategy) for one in (lies, layout))
        kept = jax.jit(lambda state: to_order(state, wanted, work.config, layout, strategy))(state)
        back = jax.jit(lambda state: to_stage_layout(state, slotted, work.config, layout, strategy))(kept)
    for (path, whole), (_, array) in zip(leaves(alone(model)), leaves(kept["params"]), strict=True):
        assert np.array_equal(np.asarray(array), whole), path
    assert jax.tree.map(lambda array: array.sharding, back) == jax.tree.map(lambda leaf: leaf.sharding, slotted)
    assert all(map(np.array_equal, *(jax.tree.leaves(jax.tree.map(np.asarray, tree)) for tree in (state, back))))


def test_layers_in_order_take_no_more_room_than_in_slots():
    """On the way they are whole over pp, and lie in shards along embed instead."""
    shape = MeshShape(pp=4, fsdp=2)
    layout = ShardingContext(shape, rules_of(INTERLEAVED))
    lies = in_order(layout, replace(MODEL, num_layers=8), INTERLEAVED)
    assert lies.spec("layers", "embed", "mlp") == jax.P(None, ("fsdp", "pp"), None)
    assert lies.spec("vocab", "embed") == jax.P(None, ("fsdp", "pp"))
    assert in_order(layout, replace(MODEL, num_layers=8), Strategy()) is layout


@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_over_other_stages_and_writes_text_without_any(model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "meshwright.execution.training.loop.build_mesh",
        lambda shape: build_mesh(shape, jax.devices()[: shape.num_devices]),
    )

    def config(shape, steps, name):
        return RunConfig(
            workload=workload(model),
            mesh=shape,
            hardware=name,
            optimizer=OPTIMIZER,
            steps=steps,
            strategy=INTERLEAVED if shape.pp > 1 else replace(INTERLEAVED, virtual_stages=1),
        )

    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(config(MeshShape(), 3, "cpu:1"), whole)
    shapes = (MeshShape(pp=2), MeshShape(fsdp=2), MeshShape(pp=2, fsdp=2))
    for taken, shape in enumerate(shapes, start=1):
        train(config(shape, taken, f"cpu:{shape.num_devices}"), moved)
    wanted, found = ([row["loss"] for row in read_metrics(run)] for run in (whole, moved))
    assert found == pytest.approx(wanted, rel=1e-5)
    texts = [mw.load(run, on="cpu:1").generate("de", max_tokens=3) for run in (whole, moved)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("shape", "strategy", "message"),
    [
        (
            MeshShape(pp=4),
            INTERLEAVED,
            r"2 virtual stages on pp=4 cut the 5 layers of tiny into 8 chunks, .* use virtual_stages 1$",
        ),
        (
            MeshShape(pp=2),
            replace(INTERLEAVED, num_microbatches=3),
            r"groups of pp=2: 3 % 2 = 1; use num_microbatches 2 or 4, or virtual_stages 1",
        ),
        (MeshShape(pp=2), replace(INTERLEAVED, optimizer="adafactor"), r"5 % 4 = 1; use adamw, lion or sgd"),
    ],
)
def test_stages_that_cannot_be_are_one_clear_error(shape, strategy, message):
    with pytest.raises(MeshwrightError, match=message):
        check_runnable(MODEL, shape, strategy)
