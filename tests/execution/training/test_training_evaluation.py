"""Evaluation in a run: the loss of text that is not trained on, on the run's own mesh and strategy."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.compiler import compiler_options
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.gradients import evaluated_means, loss_and_gradients
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.step import abstract_state, initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.watch.evaluation import Evaluator
from meshwright.execution.training.watching import EvaluationConfig
from meshwright.mesh import MeshShape

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=2), batch=8, seq_len=32, compute_dtype="f32"
)
TEXT = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)


def placed(shape, strategy):
    """Mesh, layout and a batch on them."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape, rules_of(strategy))
    with jax.set_mesh(mesh):
        spec = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(TEXT[:, :-1], spec), "targets": jax.device_put(TEXT[:, 1:], spec)}
    return mesh, layout, batch


def loss_on(shape, strategy=DEFAULT, workload=WORKLOAD):
    """The loss of one batch by the program of an evaluation."""
    mesh, layout, batch = placed(shape, strategy)
    with jax.set_mesh(mesh):
        state = initial_state(workload, layout, Optimizer(), mesh, strategy, seed=0)
        found = jax.jit(lambda p, b: evaluated_means(p, b, workload, layout, strategy)[0])
        return float(found(state["params"], batch))


@pytest.fixture(scope="module")
def alone():
    return loss_on(MeshShape())


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        (MeshShape(dp=2, fsdp=2, tp=2), Strategy(zero_stage=1)),
        (MeshShape(fsdp=4), Strategy(num_microbatches=2)),
        (MeshShape(fsdp=2, pp=2), Strategy(num_microbatches=2)),
    ],
)
@pytest.mark.matrix
def test_any_mesh_and_strategy_gives_the_loss_of_one_device(alone, shape, strategy):
    assert loss_on(shape, strategy) == pytest.approx(alone, rel=1e-5)


@pytest.mark.matrix
def test_dropout_is_left_out_and_so_is_what_experts_add(alone):
    assert loss_on(MeshShape(fsdp=2), Strategy(dropout=0.5)) == pytest.approx(alone, rel=1e-5)
    moe = replace(PRESETS["tiny-moe"], embed=64, mlp=64, num_layers=1)
    workload = replace(WORKLOAD, model=moe)
    mesh, layout, batch = placed(MeshShape(), DEFAULT)
    with jax.set_mesh(mesh):
        params = initial_state(workload, layout, Optimizer(), mesh, seed=0)["params"]
        value, parts = loss_and_gradients(params, batch, workload, layout, DEFAULT)[0]
        added = moe.experts.balance_weight * float(parts.load.balance_loss)
        plain = evaluated_means(params, batch, workload, layout, DEFAULT)[0]
        assert added > 0
        assert float(plain) == pytest.approx(float(value) - added, rel=1e-5)


@pytest.mark.matrix
def test_an_evaluation_needs_less_memory_than_a_step():
    """So that the plan of a step is the plan of a run that is evaluated."""
    mesh, layout, batch = placed(MeshShape(fsdp=2, tp=2), DEFAULT)
    with jax.set_mesh(mesh):
        state = abstract_state(WORKLOAD, layout, Optimizer(), mesh)
        step = train_step(WORKLOAD, layout, Optimizer()).lower(state, batch).compile().memory_analysis()
        found = jax.jit(
            lambda p, b: evaluated_means(p, b, WORKLOAD, layout, DEFAULT)[0], compiler_options=compiler_options()
        )
        evaluation = found.lower(state["params"], batch).compile().memory_analysis()
    assert evaluation.temp_size_in_bytes < step.temp_size_in_bytes


class Two:
    """Two batches of which the first counts three times as many tokens."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {**self.batch, "targets": self.batch["tokens"]} if number else self.batch

    def loss_tokens(self, number):
        return 30 if number == 0 else 10


@pytest.mark.slow
def test_batches_count_by_their_tokens():
    mesh, layout, batch = placed(MeshShape(fsdp=2), DEFAULT)
    config = RunConfig(
        workload=WORKLOAD, mesh=MeshShape(fsdp=2), hardware="cpu:2", optimizer=Optimizer(), steps=1,
        evaluating=EvaluationConfig(every=1),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        params = initial_state(WORKLOAD, layout, Optimizer(), mesh, seed=0)["params"]
        each = [float(evaluated_means(params, Two(batch)[n], WORKLOAD, layout, DEFAULT)[0]) for n in (0, 1)]
        found = Evaluator(config, layout, Two(batch))(params)
        one = Evaluator(replace(config, evaluating=EvaluationConfig(every=1, batches=1)), layout, Two(batch))(params)
        asked = iter((False, True))
        assert Evaluator(config, layout, Two(batch))(params, lambda: next(asked)) is None  # Given up before the second.
    assert each[0] != pytest.approx(each[1], rel=1e-4)
    assert found["eval_loss"] == pytest.approx((30 * each[0] + 10 * each[1]) / 40, rel=1e-6)
    assert found["eval_perplexity"] == pytest.approx(np.exp(found["eval_loss"]))
    assert (found["eval_tokens"], one["eval_tokens"]) == (40, 30)
    assert one["eval_loss"] == pytest.approx(each[0], rel=1e-6)


@pytest.mark.slow
def test_a_run_is_evaluated_every_few_steps_and_at_its_end(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 400)
    config = RunConfig(
        workload=replace(WORKLOAD, model=replace(WORKLOAD.model, num_layers=1)),
        mesh=MeshShape(fsdp=8),
        hardware="cpu:8",
        optimizer=Optimizer(learning_rate=0.01, warmup_steps=1, decay_steps=5),
        steps=5,
        data=DataConfig(sources=(str(text),), held_out=0.1),
        evaluating=EvaluationConfig(every=2, batches=2),
    )
    train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] + 1 for row in rows if "eval_loss" in row] == [2, 4, 5]
    found = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert found[2] < found[0]
    assert all(row["eval_seconds"] > 0 and row["eval_tokens"] == 2 * 8 * 32 for row in rows if "eval_loss" in row)
    # Nothing of it is in a step's time: steps begin after it.
    for before, row in itertools.pairwise(rows):
        assert row["time"] - row["step_seconds"] >= before["time"] + before.get("eval_seconds", 0.0) - 0.01


def test_a_run_without_held_out_text_is_refused_in_one_line(tmp_path):
    config = RunConfig(
        workload=WORKLOAD, mesh=MeshShape(fsdp=8), hardware="cpu:8", optimizer=Optimizer(), steps=1,
        evaluating=EvaluationConfig(every=2),
    )  # fmt: skip
    with pytest.raises(MeshwrightError, match="--eval-every needs text that is not trained on: --held-out SHARE"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(MeshwrightError, match="eval_batches has no effect without eval_every"):
        EvaluationConfig(batches=2)
