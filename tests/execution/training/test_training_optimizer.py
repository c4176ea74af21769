"""Learning rates and their schedules, whose weights decay, and the steps that are left out."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import check_patterns, leaves, matches, parameters
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.run import RunConfig, RunStoppedError, read_metrics
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import initial_state, train_step
from meshwright.execution.training.update import bad_steps
from meshwright.execution.training.update.bad_steps import DELAY, FEWEST, NormLimits
from meshwright.execution.training.update.optimizer import (
    Optimizer,
    check_optimizer_options,
    default_warmup,
    optimizer_from_data,
)
from meshwright.execution.training.update.skipping import NORM_LIMIT
from meshwright.execution.training.update.transformation import transformation
from meshwright.mesh import MeshShape

MODEL = replace(PRESETS["tiny"], embed=16, mlp=16, num_layers=1)
WORKLOAD = Workload(model=MODEL, batch=8, seq_len=16, compute_dtype="f32")
PATHS = [path for path, _ in leaves(parameters(MODEL))]

SCHEDULES = [
    Optimizer(schedule=schedule, warmup_steps=warmup, decay_steps=end, final_rate=final, first_rate=first)
    for schedule in ("cosine", "linear", "wsd", "constant")
    for warmup, end, final, first in ((20, 200, 0.1, None), (0, 200, 0.0, None), (20, 10, 0.5, 0.0), (1, 3, 0.1, None))
]


@pytest.mark.parametrize("optimizer", SCHEDULES)
def test_the_rate_without_jax_is_that_of_the_schedule(optimizer):
    schedule = optimizer.optax_schedule()
    for step in (0, 1, 2, 3, 19, 20, 21, 100, 163, 164, 165, 180, 199, 200, 1000):
        assert optimizer.rate(step) == pytest.approx(float(schedule(step)), rel=1e-5, abs=1e-9)


def test_schedules_rise_from_the_first_step_on_and_fall_as_they_are_called():
    cosine, linear, wsd, constant = (
        Optimizer(learning_rate=1.0, warmup_steps=10, decay_steps=110, schedule=schedule)
        for schedule in ("cosine", "linear", "wsd", "constant")
    )
    for each in (cosine, linear, wsd, constant):
        assert each.rate(0) == pytest.approx(0.1)
        assert each.rate(10) == 1.0
    assert cosine.rate(60) == pytest.approx(linear.rate(60)) == pytest.approx(0.55)
    assert cosine.rate(35) > linear.rate(35) == pytest.approx(0.775)
    assert [wsd.rate(step) for step in (90, 100, 110, 500)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert constant.rate(10**6) == 1.0
    assert [default_warmup(steps) for steps in (1, 5, 200, 10**6)] == [1, 1, 20, 2000]


def test_a_run_of_before_keeps_the_schedule_and_the_decay_that_it_had():
    before = {"learning_rate": 0.003, "warmup_steps": 20, "decay_steps": 200, "weight_decay": 0.1, "b1": 0.9}
    optimizer = optimizer_from_data(before)
    former = optax.warmup_cosine_decay_schedule(0.0, 0.003, 20, 200, 0.003 / 10)
    ours = optimizer.optax_schedule()
    assert [float(ours(step)) for step in range(210)] == [float(former(step)) for step in range(210)]
    assert [path for path in PATHS if not optimizer.decays(path)] == [path for path in PATHS if "norm" in path]
    assert optimizer_from_data({**before, "schedule": "cosine"}).first_rate is None


def test_norms_biases_and_tables_do_not_decay_by_default():
    gpt2 = [path for path, _ in leaves(parameters(PRESETS["tiny-gpt2"]))]
    kept = {path.rpartition(".")[2] for path in gpt2 if Optimizer().decays(path)}
    assert kept == {"query", "key", "value", "output", "up", "down"}
    deepseek = [path for path, _ in leaves(parameters(PRESETS["tiny-deepseek"]))]
    assert not any(Optimizer().decays(path) for path in deepseek if "norm" in path or "bias" in path)
    assert Optimizer().decays("unembedding")
    assert Optimizer().decays("layers.router")


def test_decay_and_factors_reach_the_parameters_that_are_named():
    """With gradients of zero an update is the decay alone, which each pattern multiplies or leaves out."""
    optimizer = Optimizer(
        learning_rate=1.0, warmup_steps=0, rates=("layers=0.5", "query=0.25"), no_decay=("key", "unembedding")
    )
    params = {path: np.ones(2, np.float32) for path in PATHS}
    rule = transformation(optimizer, WORKLOAD, ShardingContext(MeshShape()))
    updates, _ = rule.update({path: np.zeros(2, np.float32) for path in PATHS}, rule.init(params), params)
    for path in PATHS:
        factor = 0.25 if path == "layers.query" else 0.5 if path.startswith("layers.") else 1.0
        wanted = 0.0 if path in ("layers.key", "unembedding") else -0.1 * factor
        assert np.asarray(updates[path]) == pytest.approx(wanted), path


@pytest.mark.parametrize(
    ("said", "strategy", "message"),
    [
        ({"rate": ("embeding=0.1",)}, Strategy(), "rate is 'embeding', which names no .* did you mean embedding"),
        ({"no_decay": ("layers.keys",)}, Strategy(), "did you mean layers.key"),
        ({"b2": 0.9}, Strategy(optimizer="sgd"), "b2 has no effect with optimizer sgd"),
        ({"momentum": 0.9}, Strategy(), "momentum has no effect with optimizer adamw; it is for optimizer muon"),
        ({"decay_share": 0.1}, Strategy(), "decay_share has no effect with lr_schedule cosine"),
        ({"max_bad_steps": 3}, Strategy(), "max_bad_steps has no effect with on_bad_step stop"),
    ],
)
def test_what_changes_nothing_or_names_nothing_is_refused(said, strategy, message):
    fields = {"rates" if name == "rate" else name: value for name, value in said.items()}
    with pytest.raises(MeshwrightError, match=message):
        check_optimizer_options(Optimizer(**fields), said, strategy, MODEL)
    check_optimizer_options(Optimizer(), (), strategy, MODEL)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"rates": ("embedding=0",)}, "would learn nothing; --freeze embedding freezes it"),
        ({"rates": ("embedding",)}, "a pattern of parameters and a factor above 0"),
        ({"rates": ("embedding=-1",)}, "a factor above 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it is a number from 0"),
        ({"b2": 1.0}, "b2 is 1.0; it is a number from 0 to below 1"),
        ({"final_rate": 1.5}, "final_rate is 1.5; it is a share from 0 to 1"),
        ({"eps": 0.0}, "eps is 0.0; it is a number above 0"),
        ({"spike_factor": 1.0}, "spike_factor is 1.0; it is a number above 1"),
        ({"max_bad_steps": 0}, "max_bad_steps is 0"),
        ({"schedule": "step"}, "schedule is 'step'; "),
    ],
)
def test_a_field_out_of_its_range_is_named(field, message):
    with pytest.raises(MeshwrightError, match=message):
        Optimizer(**field)


def test_patterns_name_paths_names_and_beginnings():
    assert [path for path in PATHS if matches("layers", path)] == [path for path in PATHS if path.startswith("layers.")]
    assert not matches("lay", "layers.query")
    assert not matches("layers.quer", "layers.query")
    check_patterns("rate", ["*norm*", "query", "layers.*", "unembeddin?"], PATHS)


def test_the_limit_follows_the_running_median_of_the_steps_before():
    limits = NormLimits(10.0, [])
    for step in range(FEWEST):
        assert limits.limit(step) == math.inf
        limits.add({"step": step, "grad_norm": float(step + 1)})
    last = FEWEST - 1
    assert limits.limit(last + DELAY - 1) == math.inf
    assert limits.limit(last + DELAY) == 10 * (FEWEST + 1) / 2
    limits.add({"step": last + 1, "grad_norm": 1e9, "skipped": 1})
    limits.add({"step": last + 2, "grad_norm": math.nan, "skipped": 1})
    assert limits.limit(last + 20) == 10 * (FEWEST + 1) / 2
    assert NormLimits(None, [{"step": step, "grad_norm": 1.0} for step in range(99)]).limit(99) == math.inf


CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=8, max_bad_steps=3),
    strategy=Strategy(on_bad_step="skip"),
    steps=8,
    saving=Saving(every=4),
)


def steps_of(mesh_shape, strategy, limits):
    """The state after each of some steps of one batch, given these limits; and their metrics."""
    mesh = build_mesh(mesh_shape, jax.devices()[: mesh_shape.num_devices])
    layout = ShardingContext(mesh_shape)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17), dtype=np.int32)
    found = []
    with jax.set_mesh(mesh):
        state = initial_state(WORKLOAD, layout, CONFIG.optimizer, mesh, strategy, seed=0)
        step = train_step(WORKLOAD, layout, CONFIG.optimizer, strategy)
        sharding = jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        for limit in limits:
            batch = jax.device_put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, sharding)
            batch[NORM_LIMIT] = jax.device_put(np.float32(limit), whole)
            before = state
            state, metrics = step(state, batch)
            assert before["params"]["embedding"].is_deleted()  # Donated: no second copy of the state.
            found.append((jax.tree.map(np.asarray, state), {name: value.item() for name, value in metrics.items()}))
        assert step._cache_size() == 1
    return found


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lion", marks=pytest.mark.matrix)])
def test_a_step_over_its_limit_leaves_the_state_but_for_the_schedule(optimizer):
    strategy = Strategy(optimizer=optimizer, on_bad_step="skip")
    (first, one), (second, two), (third, three) = steps_of(MeshShape(fsdp=2), strategy, [math.inf, 1e-6, math.inf])
    assert [one["skipped"], two["skipped"], three["skipped"]] == [0, 1, 0]
    pairs = list(zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True))
    changed = [jax.tree_util.keystr(path) for (path, old), new in pairs if not np.array_equal(old, new)]
    assert len(changed) == 1
    assert changed[0].endswith(".count")
    assert three["loss"] == two["loss"]
    assert not np.array_equal(second["params"]["embedding"], third["params"]["embedding"])


@pytest.mark.slow
def test_bad_steps_are_left_out_and_a_resumed_run_leaves_out_the_same(tmp_path, monkeypatch):
    # What the second and the seventh step may have is set so low that they are bad.
    limits = bad_steps.NormLimits.limit
    monkeypatch.setattr(
        bad_steps.NormLimits, "limit", lambda self, step: 1e-6 if step in (1, 6) else limits(self, step)
    )
    straight, broken, notes = tmp_path / "straight", tmp_path / "broken", []
    run_steps(CONFIG, straight, on_note=notes.append)
    assert [note.split(":")[0] for note in notes] == ["step 2 is left out", "step 7 is left out"]
    rows = read_metrics(straight)
    assert [row["step"] for row in rows if row["skipped"]] == [1, 6]
    lines = [json.loads(line) for line in (straight / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 6]
    assert lines[0]["seed"] == 0
    assert [len(rows) for rows in lines[0]["items"].values()] == [CONFIG.workload.batch]
    assert lines[0]["why"].startswith("the norm of the gradients is ")
    run_steps(replace(CONFIG, steps=4), broken, on_note=notes.append)
    run_steps(CONFIG, broken, on_note=notes.append)
    again = read_metrics(broken)
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    assert (broken / "bad_steps.jsonl").read_text() == (straight / "bad_steps.jsonl").read_text()


@pytest.mark.matrix
def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(bad_steps.NormLimits, "limit", lambda self, step: 1e-6 if step > 2 else math.inf)
    with pytest.raises(RunStoppedError, match="3 steps in a row were left out, and in the last one the norm"):
        run_steps(CONFIG, tmp_path / "run", on_note=lambda line: None)
    assert len(read_metrics(tmp_path / "run")) == 6
    stopped = replace(CONFIG, strategy=Strategy())
    with pytest.raises(RunStoppedError, match=r"norm of the gradients is .* at step 4, where"):
        run_steps(stopped, tmp_path / "stopped", on_note=lambda line: None)
