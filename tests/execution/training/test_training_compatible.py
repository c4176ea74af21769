"""What a checkpoint and the run that continues from it may differ in, and what becomes of its arrays then."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import jax
import numpy as np
import optax
import pytest
import tiny_run

from meshwright.description.step.model import Norms
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.library import allowed_differences
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.compatible import (
    config_differences,
    identity_differences,
    read_allowed,
)
from meshwright.execution.training.run_directory.resume import resumed_run
from meshwright.execution.training.run_directory.run import begin_run, read_config, read_metrics
from meshwright.execution.training.step import abstract_state

CONFIG = replace(tiny_run.CONFIG, steps=2)
BF16 = replace(CONFIG, workload=replace(CONFIG.workload, param_dtype="bf16"))
MASTER = replace(BF16, strategy=Strategy(master_weights=True))
LION = replace(CONFIG, strategy=Strategy(optimizer="lion"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two steps in float32."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run_steps(CONFIG, directory)
    return directory


@pytest.fixture
def run(whole, tmp_path):
    return copytree(whole, tmp_path / "run")


def state_at(config, directory, step):
    mesh = build_mesh(config.mesh)
    with jax.set_mesh(mesh):
        wanted = abstract_state(config.workload, ShardingContext(config.mesh), config.optimizer, mesh, config.strategy)
        return Checkpoints(directory).restore(step, wanted)


def go_on(config, run, *allow, steps):
    """The notes of a run that continues as another."""
    notes = []
    run_steps(replace(config, steps=steps), run, on_note=notes.append, allow=allow)
    return notes


def test_a_run_of_before_its_features_were_in_parts_is_of_the_same_model():
    former = json.loads((Path(__file__).parents[2] / "data" / "former_models.json").read_text())["tiny"]
    before = CONFIG.to_json()
    before["workload"]["model"] = former | {"embed": 16, "mlp": 16, "num_layers": 1}
    assert config_differences(CONFIG, before) == []
    other = replace(CONFIG, workload=replace(CONFIG.workload, model=replace(CONFIG.workload.model, positions="alibi")))
    where = "workload.model.positions"
    names = [f"{where}{name}" for name in ("", ".frequencies", ".dims", ".is_interleaved")]
    assert [each.name for each in config_differences(other, before)] == names


def test_every_difference_is_said_at_once_and_how_it_is_allowed(run):
    other = replace(LION, workload=BF16.workload, steps=4)
    with pytest.raises(MeshwrightError) as raised:
        run_steps(other, run)
    assert str(raised.value) == (
        f"{run} cannot continue from checkpoint 2: workload.param_dtype is 'bf16' in config.json, and 'f32' in the"
        " checkpoint; strategy.optimizer is 'lion' in config.json, and 'adamw' in the checkpoint; put it back, or start"
        " a new run; --allow dtype,optimizer continues with it"
    )
    model = replace(
        other, workload=replace(other.workload, model=replace(CONFIG.workload.model, norms=Norms(epsilon=0.5)))
    )
    with pytest.raises(
        MeshwrightError, match=r"workload.model.norms.epsilon is 0.5 .*; put it back, or start a new run$"
    ):
        run_steps(model, run, allow=("dtype", "optimizer"))


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_goes_on_in_other_dtypes_and_back(run):
    notes = go_on(MASTER, run, "dtype", steps=3)
    assert [note.split(" is ")[0] for note in notes] == ["workload.param_dtype", "strategy.master_weights"]
    assert all(note.endswith(": allowed") for note in notes)
    state = state_at(MASTER, run, 3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["master"])} == {"float32"}
    go_on(CONFIG, run, "dtype", steps=4)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state_at(CONFIG, run, 4)["params"])} == {"float32"}
    losses = [row["loss"] for row in read_metrics(run)]
    assert len(losses) == 4
    assert np.isfinite(losses).all()


def test_float32_copies_are_the_parameters_they_are_of(run, whole):
    """No bit of float32 is lost on the way to bfloat16 with copies and back: the step after is that of float32."""
    from meshwright.execution.training.run_directory.restart import first_state

    def restored(config, directory, step):
        mesh, layout = build_mesh(config.mesh), ShardingContext(config.mesh)
        with jax.set_mesh(mesh):
            return first_state(config, layout, mesh, Checkpoints(directory), step, lambda _: None)

    before, after = state_at(CONFIG, run, 2), restored(MASTER, run, 2)
    for own, copy in zip(jax.tree.leaves(before["params"]), jax.tree.leaves(after["master"]), strict=True):
        np.testing.assert_array_equal(own, copy)
    for own, narrow in zip(jax.tree.leaves(before["params"]), jax.tree.leaves(after["params"]), strict=True):
        np.testing.assert_array_equal(np.asarray(own).astype(narrow.dtype), narrow)


def test_another_optimizer_begins_with_moments_of_its_own_at_its_place_in_the_schedule(run):
    notes = go_on(LION, run, "optimizer", steps=3)
    assert notes == ["strategy.optimizer is 'lion' in config.json, and 'adamw' in the checkpoint: allowed; its moments"
                     " begin afresh"]  # fmt: skip
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["learning_rate"] == pytest.approx(LION.optimizer.rate(2))
    moments = state_at(LION, run, 3)["optimizer"]

    def is_schedule(node):
        return isinstance(node, optax.ScaleByScheduleState)

    schedules = [node for node in jax.tree.leaves(moments, is_leaf=is_schedule) if is_schedule(node)]
    assert [int(node.count) for node in schedules] == [3] * len(schedules)
    assert schedules


def test_other_data_under_the_same_name_are_refused_unless_they_are_allowed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 20)
    config, run = replace(CONFIG, data=DataConfig(sources=(str(text),))), tmp_path / "run"
    run_steps(config, run)
    text.write_text("Whether it is nobler in the mind to suffer\n" * 20)
    with pytest.raises(
        MeshwrightError, match=r"the data has the checksum .{12}, and had .{12} when .*--allow data continues"
    ):
        go_on(config, run, steps=3)
    assert [note.endswith(": allowed") for note in go_on(config, run, "data", steps=3)] == [True]
    assert allowed_differences("dtype", {"data": ("x",), "seed": 1}, change=True) == {"dtype", "data"}
    assert allowed_differences(None, {"seed": 1, "data": None}, change=True) == frozenset()
    assert allowed_differences(None, {"data": ("x",)}, change=False) == frozenset()


def test_tokenizers_are_compared_by_their_files_and_old_checkpoints_say_nothing():
    assert identity_differences({"tokenizer": "b" * 64}, None) == []
    [found] = identity_differences({"tokenizer": "b" * 64, "data": "d"}, {"tokenizer": "a" * 64, "data": "d"})
    assert found.kind == "tokenizer"
    with pytest.raises(MeshwrightError, match="allow is 'optimiser'; did you mean optimizer"):
        read_allowed("data,optimiser")


def test_settings_edited_in_config_json_are_said(run):
    data = json.loads((run / "config.json").read_text())
    data["workload"]["batch"], data["seed"], data["strategy"]["dropout"] = 16, 3, 0.1
    (run / "config.json").write_text(json.dumps(data))
    notes = go_on(read_config(run), run, steps=3)
    assert notes == [
        "workload.batch is 16, and was 8 when the checkpoint was written",
        "seed is 3, and was 0 when the checkpoint was written",
        "strategy.dropout is 0.1, and was 0.0 when the checkpoint was written",
    ]


def test_a_checkpoint_of_a_newer_version_is_one_line(run):
    path = run / "checkpoints" / "2" / "config" / "metadata"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"tachyons": 1}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.execution.training.run_directory.checkpoint.find_damage", lambda *_, **__: "")
        with pytest.raises(MeshwrightError, match=r"checkpoint 2 of .* another version of meshwright: .*tachyons"):
            go_on(CONFIG, run, steps=3)


def test_options_that_checkpoints_depend_on_are_taken_where_they_are_allowed(tmp_path):
    begin_run(tmp_path, CONFIG, 0)
    more = {"steps": None, "change": False, "options": {"optimizer": "lion", "param_dtype": "bf16"}}
    with pytest.raises(MeshwrightError, match="were made with 'adamw', and --allow optimizer continues with the new"):
        resumed_run(tmp_path, **more, allow=("dtype",))
    config, lines = resumed_run(tmp_path, **more, allow=("dtype", "optimizer"))
    assert (config.strategy.optimizer, config.workload.param_dtype) == ("lion", "bf16")
    assert lines == ["optimizer: 'lion' instead of 'adamw'", "param_dtype: 'bf16' instead of 'f32'"]
