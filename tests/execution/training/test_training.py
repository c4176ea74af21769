"""A run from start to end: data, loop, checkpoints, resuming, and what was measured."""

import json
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.run import (
    RunConfig,
    RunStoppedError,
    begin_run,
    read_config,
    read_metrics,
)
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import abstract_state
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1), batch=8, seq_len=32, compute_dtype="f32"
)
CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(fsdp=2, tp=4),
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=6, first_rate=0.0),
    steps=6,
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 6 steps without a pause."""
    directory = tmp_path_factory.mktemp("run")
    train(CONFIG, directory)
    return directory


def final_params(directory, config):
    """The parameters at the end of a run, whole."""
    mesh, layout = build_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]), ShardingContext(config.mesh)
    with jax.set_mesh(mesh), Checkpoints(directory) as checkpoints:
        state = checkpoints.restore(checkpoints.latest, abstract_state(WORKLOAD, layout, config.optimizer, mesh))
    return jax.tree.map(np.asarray, state["params"])


def test_a_run_leaves_its_config_a_line_a_step_and_a_checkpoint(unbroken):
    assert read_config(unbroken) == CONFIG
    rows = read_metrics(unbroken)
    assert [row["step"] for row in rows] == list(range(6))
    assert {"loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second", "mfu"} <= set(rows[0])
    with Checkpoints(unbroken) as checkpoints:
        assert checkpoints.latest == 6


def test_the_loss_starts_near_that_of_chance_and_falls(unbroken):
    losses = [row["loss"] for row in read_metrics(unbroken)]
    assert losses[0] == pytest.approx(np.log(256), abs=0.6)
    assert losses[-1] < losses[0]


def test_a_run_resumed_on_another_mesh_ends_where_an_unbroken_one_does(unbroken, tmp_path):
    train(replace(CONFIG, steps=3), tmp_path)
    moved = replace(CONFIG, mesh=MeshShape(dp=2, fsdp=2), hardware="cpu:4")
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:4]
        patch.setattr("meshwright.execution.training.loop.build_mesh", lambda shape: build_mesh(shape, devices))
        record = train(moved, tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(6))
    assert record.mesh["dp"] == 2
    one, other = final_params(unbroken, CONFIG), final_params(tmp_path, moved)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_an_interrupted_run_finishes_its_step_saves_and_goes_on(unbroken, tmp_path):
    def interrupt(row):
        if row["step"] == 1:
            signal.raise_signal(signal.SIGTERM)

    line = (
        "stopped by SIGTERM after 2 of 6 steps; the last checkpoint is .*checkpoints/2; .* --resume. continues from it"
    )
    with (
        pytest.warns(UserWarning, match="stopping after this step"),
        pytest.raises(RunStoppedError, match=line),
    ):
        train(CONFIG, tmp_path, on_step=interrupt)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 2
    train(CONFIG, tmp_path)
    wanted, found = ([row["loss"] for row in read_metrics(d)] for d in (unbroken, tmp_path))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_checkpoints_are_kept_as_often_as_asked(tmp_path):
    train(replace(CONFIG, steps=4, saving=Saving(every=2)), tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == [2, 4]
        assert checkpoints.latest == 4


def test_a_run_that_has_taken_its_steps_says_so(unbroken):
    with pytest.warns(UserWarning, match="is finished: it has taken 6 steps"):
        train(CONFIG, unbroken)


def test_what_is_measured_is_the_median_step_of_the_mesh(unbroken):
    from meshwright.execution.training.run_record import measured

    times = sorted(row["step_seconds"] for row in read_metrics(unbroken)[1:])
    record = measured(CONFIG, read_metrics(unbroken))
    assert record.step_seconds == times[2]
    assert record.tokens_per_second == pytest.approx(WORKLOAD.tokens / times[2])
    assert 0 < record.mfu < 1


def test_text_follows_from_the_last_checkpoint(unbroken):
    one, other = mw.load(unbroken).generate(["def ", "def "], max_tokens=5)
    assert len(one.tokens) == 5
    assert one == other


def test_a_run_without_a_checkpoint_has_nothing_to_generate_from(tmp_path):
    begin_run(tmp_path, CONFIG, 0)
    with pytest.raises(MeshwrightError, match="has no checkpoint yet"):
        mw.load(tmp_path)


def test_a_half_written_last_line_of_metrics_is_left_out(tmp_path):
    row = {"step": 0, "mesh": "fsdp=8", "hardware": "cpu:8", "step_seconds": 1.0, "memory_peak_bytes": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 1, "lo')
    assert read_metrics(tmp_path) == [row]


ROW = '"mesh": "fsdp=8", "hardware": "cpu:8", "memory_peak_bytes": null'


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}', "[1]", "\0\0", "", f'{{"step": -5, "step_seconds": 1, {ROW}}}',
        f'{{"step": [1], "step_seconds": 1, {ROW}}}', f'{{"step": 1, "step_seconds": 0, {ROW}}}',
        f'{{"step": 1, "step_seconds": 1, "loss": "5.5", {ROW}}}',
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_metrics_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(MeshwrightError, match=r"metrics\.jsonl, line 1: this is not a line of metrics"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 1}', "hardware is missing"),
        (f'{{"step": 1, "step_seconds": 0, {ROW}}}', "step_seconds is 0; it is a number above 0"),
        (f'{{"step": 1, "step_seconds": 1, "loss": "5.5", {ROW}}}', "loss is '5.5'; it is a number"),
    ],
)
def test_the_field_that_makes_a_line_none_of_metrics_is_named(tmp_path, line, said):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(MeshwrightError, match=f"line 1: this is not a line of metrics: {said}"):
        read_metrics(tmp_path)


def test_a_directory_that_is_no_run_is_told(tmp_path):
    with pytest.raises(MeshwrightError, match="no run in"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"steps": 1}')
    with pytest.raises(MeshwrightError, match="is not the config of a run"):
        read_config(tmp_path)
