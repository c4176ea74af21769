"""Run directories: damage is noticed, one process at a time writes, settings are held, training stops when it must."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import tiny_run

import meshwright as mw
from meshwright.cli.main import main
from meshwright.description.hardware.load import DATA
from meshwright.description.step.model import Family
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError, TemporaryError
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.compatible import config_differences
from meshwright.execution.training.run_directory.lock import RunLock
from meshwright.execution.training.run_directory.resume import resumed_run
from meshwright.execution.training.run_directory.run import (
    RunStoppedError,
    begin_run,
    config_from_data,
    read_config,
    read_metrics,
    repair_lines,
)
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.settings import get_setting, with_settings
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.options.keywords import PlanOptions, TrainOptions
from meshwright.options.training import SETTINGS
from meshwright.support.checksums import find_damage, write_checksums, write_left_checksums

CONFIG = replace(tiny_run.CONFIG, saving=Saving(every=2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps, with checkpoints 4 and 6."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run_steps(CONFIG, directory)
    return directory


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(whole, tmp_path / "run")


def damage(checkpoint, rng):
    """Cut, change or remove one file of a checkpoint; what was done."""
    path = rng.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    how = rng.choice(["cut", "flip", "remove"])
    if how == "remove":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return how, path


def test_each_of_100_damaged_checkpoints_is_noticed_and_the_one_before_is_taken(run, tmp_path):
    rng = random.Random(13)
    kept, last = tmp_path / "kept", run / "checkpoints" / "6"
    shutil.copytree(last, kept)
    for _ in range(100):
        how, path = damage(last, rng)
        notes = []
        assert Checkpoints(run).whole(notes.append) == 4, (how, path)
        assert len(notes) == 1
        assert "run/checkpoints/6 is damaged" in notes[0]
        assert "checkpoint 4 is whole and is taken" in notes[0]
        if how == "flip" and not path.name.startswith("SHA256SUMS"):
            assert str(path.relative_to(last)) in notes[0]
        shutil.rmtree(last)
        shutil.copytree(kept, last)
    assert Checkpoints(run).whole(pytest.fail) == 6


def test_a_run_goes_on_from_the_last_whole_checkpoint(whole, run):
    """The damaged one is kept under another name, and the steps after the whole one are taken again, once each."""
    rng, notes = random.Random(1), []
    damage(run / "checkpoints" / "6", rng)
    run_steps(replace(CONFIG, steps=8), run, on_note=notes.append)
    assert [note.split(":")[0] for note in notes] == [
        f"checkpoint {run}/checkpoints/6 is damaged",
        f"{run} continues from checkpoint 4",
        "checkpoint 6 is kept as 6.damaged",
    ]
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(8))
    assert (run / "metrics.jsonl").read_text().count('"loss"') == 8
    before = [row["loss"] for row in read_metrics(whole)]
    assert [row["loss"] for row in rows[:6]] == pytest.approx(before, rel=1e-6)
    assert Checkpoints(run).steps == [6, 8]
    assert Checkpoints(run).whole(pytest.fail) == 8
    assert not (run / "lock").exists()


def test_where_no_checkpoint_is_whole_the_run_says_so_and_nothing_changes(run):
    for step in (4, 6):
        (run / "checkpoints" / str(step) / "config" / "metadata").unlink()
    before = sorted(run.rglob("*"))
    with pytest.raises(MeshwrightError, match="6 is damaged: config/metadata is missing; no other is whole"):
        run_steps(replace(CONFIG, steps=8), run)
    assert sorted(run.rglob("*")) == before


def text_of(run, notes):
    return mw.load(run, on_note=notes.append).generate("def ", max_tokens=2)[0].tokens


def test_text_needs_the_parameters_alone_and_takes_those_that_are_whole(run):
    notes = []
    shutil.rmtree(run / "checkpoints" / "6" / "optimizer")
    first = text_of(run, notes)
    assert notes == []
    next((run / "checkpoints" / "6" / "params").rglob("d/*")).write_bytes(b"")
    text_of(run, notes)
    assert "checkpoint 4 is whole and is taken" in notes[0]
    assert len(first) == 2


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("workload", "model", "num_layers"), 2, "workload.model.num_layers is 2 in config.json, and 1 in"),
        (("workload", "model", "mlp"), 32, "workload.model.mlp is 32"),
        (("workload", "model", "norms", "epsilon"), 5.0, "workload.model.norms.epsilon is 5.0"),
        (("strategy", "optimizer"), "sgd", "strategy.optimizer is 'sgd' in config.json, and 'adamw' in"),
    ],
)
def test_a_config_edited_against_its_checkpoint_is_named_by_its_field(run, path, value, field):
    data = json.loads((run / "config.json").read_text())
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (run / "config.json").write_text(json.dumps(data))
    with pytest.raises(MeshwrightError, match=field):
        run_steps(replace(read_config(run), steps=8), run)
    with pytest.raises(MeshwrightError, match=field):
        text_of(run, [])


@pytest.mark.slow
def test_checkpoints_that_were_deleted_are_missed(run):
    shutil.rmtree(run / "checkpoints")
    notes = []
    run_steps(replace(CONFIG, steps=1), run, on_note=notes.append)
    assert notes == [f"{run} has no checkpoint: its 6 steps are taken again, from the first"]
    assert [row["step"] for row in read_metrics(run)] == [0]


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_checkpoint(run):
    config = replace(CONFIG, steps=9, optimizer=Optimizer(learning_rate=1e30, warmup_steps=2), saving=Saving(every=1))
    with pytest.raises(RunStoppedError) as raised:
        run_steps(config, run)
    message = str(raised.value)
    assert " is nan at step " in message
    assert len(message.splitlines()) == 1
    last = Checkpoints(run).whole(pytest.fail)
    assert last >= 6
    assert f"the last checkpoint is {run / 'checkpoints' / str(last)};" in message
    rows = read_metrics(run)
    assert rows[-1]["loss"] is None or rows[-1]["grad_norm"] is None
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    [bad] = map(json.loads, (run / "bad_steps.jsonl").read_text().splitlines())
    assert f"({run / 'bad_steps.jsonl'} has the rows it read); training stops" in message
    assert bad["step"] == rows[-1]["step"]
    assert [len(items) for items in bad["items"].values()] == [config.workload.batch]
    # The loss that the kept checkpoint gives is a number.
    assert np.isfinite(rows[last]["loss"])
    assert np.isfinite(rows[last]["grad_norm"])


def test_a_disk_that_is_full_is_one_line_that_names_the_last_checkpoint(run, monkeypatch):
    def full(path, line):
        raise MeshwrightError(f"cannot write {path}: the disk is full, 12 kB are free")

    monkeypatch.setattr("meshwright.execution.training.run_directory.run.append_line", full)
    notes = []
    with pytest.raises(RunStoppedError) as raised:
        run_steps(replace(CONFIG, steps=8), run, on_note=notes.append)
    assert len(notes) == 1
    assert "the disk is full, 12 kB are free; training continues, and its metrics are kept" in notes[0]
    assert "the disk is full, 12 kB are free; training stops; the last checkpoint is " in str(raised.value)
    assert read_config(run).steps == 8
    assert not (run / "lock").exists()


def test_a_start_that_fails_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    config = replace(CONFIG, workload=replace(CONFIG.workload, seq_len=10**8))
    with pytest.raises(MeshwrightError, match="the data has"):
        run_steps(config, tmp_path / "a" / "run")

    def fail(*_, **__):
        raise MeshwrightError("no step")

    monkeypatch.setattr("meshwright.execution.training.loop.train_step", fail)
    with pytest.raises(MeshwrightError, match="no step"):
        run_steps(CONFIG, tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time_trains_in_a_directory(tmp_path):
    lock = RunLock(tmp_path / "runs" / "a", pytest.fail)
    with pytest.raises(MeshwrightError, match=f"is in use: process {os.getpid()} trains in it"):
        RunLock(tmp_path / "runs" / "a", pytest.fail)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_died_is_taken_over_with_a_word(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from meshwright.execution.training.run_directory.lock import RunLock\n"
        "RunLock(Path(sys.argv[1]), print); print(os.getpid(), flush=True); os._exit(9)"
    )
    died = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert died.returncode == 9
    assert (tmp_path / "run" / "lock").exists()
    notes = []
    RunLock(tmp_path / "run", notes.append).release()
    assert notes == [
        f"{tmp_path / 'run'} was locked by process {died.stdout.strip()}, which has ended; its lock is taken over"
    ]


def test_the_lock_of_another_machine_is_believed_while_its_process_touches_it(tmp_path, monkeypatch):
    """A node that was lost left its lock a moment ago, with fresh metrics: the job continues elsewhere at once."""
    lock, notes = tmp_path / "lock", []
    lock.write_text(json.dumps({"process": 1, "machine": "elsewhere"}))
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setattr("meshwright.execution.training.run_directory.lock.WATCH_SECONDS", 0.2)
    touching = threading.Timer(0.1, os.utime, (lock,))
    touching.start()
    with pytest.raises(TemporaryError, match="process 1 on elsewhere trains in it"):
        RunLock(tmp_path, notes.append)
    touching.join()
    RunLock(tmp_path, notes.append).release()
    assert [line for line in notes if "waiting 0.2 s for a sign of it" in line] == notes[:2]
    assert "process 1 on elsewhere, which has ended" in notes[2]


@pytest.mark.parametrize("lives", [True, False])
def test_a_disk_without_locks_has_the_holder_show_that_it_lives(lives, tmp_path, monkeypatch):
    """Processes of two containers may have one host name and one id."""
    module = "meshwright.execution.training.run_directory.lock"
    monkeypatch.setattr(f"{module}.WATCH_SECONDS", 0.3)
    monkeypatch.setattr(f"{module}.BEAT_SECONDS", 0.05 if lives else 60.0)

    def fail(*_):
        raise OSError("no locks")

    monkeypatch.setattr(f"{module}.fcntl.flock", fail)
    first = RunLock(tmp_path / "run", pytest.fail)
    if lives:
        with pytest.raises(TemporaryError, match="is in use"):
            RunLock(tmp_path / "run", lambda _: None)
    else:
        RunLock(tmp_path / "run", lambda _: None).release()
    first.release()


def test_a_directory_in_use_ends_a_command_with_1_as_another_start_may_find_it_free(begun, capsys):
    lock = RunLock(begun, pytest.fail)
    assert main(["train", str(begun), "--resume"]) == 1
    assert "is in use: process" in capsys.readouterr().err
    lock.release()


def test_two_parts_of_checksums_cover_all_files(tmp_path):
    for name in ("a", "b/c", "b/d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path, part=0, parts=2)
    assert find_damage(tmp_path, parts=2) == "b/c has no checksum"
    write_checksums(tmp_path, part=1, parts=2)
    assert [find_damage(tmp_path, part=part, parts=2) for part in (0, 1)] == ["", ""]
    (tmp_path / "b" / "c").write_text("x")
    assert [find_damage(tmp_path, part=part, parts=2) for part in (0, 1)] == ["", "b/c is not what was written"]
    assert find_damage(tmp_path, folders=("e",)) == ""


def test_files_that_one_of_two_processes_did_not_see_get_checksums(tmp_path):
    """The first lists the files before the last is written, the second while the first writes its checksums."""
    for name in ("a", "c", "d"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path, part=0, parts=2)
    (tmp_path / "b").write_text("b")
    (tmp_path / ".0123abcd.partial").write_text("half")
    write_checksums(tmp_path, part=1, parts=2)
    (tmp_path / ".0123abcd.partial").unlink()
    assert find_damage(tmp_path) == "c has no checksum"
    write_left_checksums(tmp_path)
    assert find_damage(tmp_path) == ""
    (tmp_path / "c").write_text("x")
    assert find_damage(tmp_path) == "c is not what was written"


@pytest.fixture
def begun(tmp_path):
    """A run directory without checkpoints, for what is read of its config alone."""
    begin_run(tmp_path, CONFIG, 0)
    return tmp_path


def resumed(directory, *, steps=None, change=False, **options):
    return resumed_run(directory, steps=steps, change=change, options=options)


CHANGES = {
    "batch": ("16", 16),
    "seq_len": ("32", 32),
    "learning_rate": (0.5, 0.5),
    "seed": (7, 7),
    "data": (("README.md",), ("README.md",)),
    "dtype": ("bf16", "bf16"),
    "remat": ("none", "none"),
    "num_microbatches": ("2", 2),
    "attention": ("flash", "flash"),
    "dropout": (0.5, 0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_setting_is_refused_by_name_or_taken_and_said(begun, name):
    typed, value = CHANGES[name]
    with pytest.raises(MeshwrightError, match=rf"^{name} is .*: --change \(change=True\) continues"):
        resumed(begun, **{name: typed})
    config, lines = resumed(begun, change=True, **{name: typed})
    assert lines == [f"{name}: {value!r} instead of {lines[0].partition(' instead of ')[2]}"]
    assert config != CONFIG


def test_packed_is_the_rows_of_a_run(tmp_path):
    begin_run(tmp_path, replace(CONFIG, data=DataConfig(rows="windows")), 0)
    with pytest.raises(MeshwrightError, match=r"^rows is 'packed'; .* was begun with 'windows': --change"):
        resumed(tmp_path, packed=True)
    config, _ = resumed(tmp_path, packed=True, change=True)
    assert (config.data.rows, config.workload.packed) == ("packed", True)


def test_a_config_without_its_seed_is_not_that_of_a_run(begun):
    data = json.loads((begun / "config.json").read_text())
    del data["seed"]
    (begun / "config.json").write_text(json.dumps(data))
    with pytest.raises(MeshwrightError, match="is not the config of a run: seed is missing"):
        read_config(begun)


def test_texts_may_be_a_list_or_one(begun):
    config = with_settings(CONFIG, {"data": ["a.txt", "b.txt"], "eval_data": "c.txt", "eval_every": 2})
    assert (config.data.sources, config.evaluating.data) == (("a.txt", "b.txt"), ("c.txt",))


def test_the_same_setting_is_no_change(begun):
    same = {"batch": "8", "seq_len": 16, "learning_rate": 3e-3, "seed": 0, "dtype": "f32", "optimizer": "adamw"}
    assert resumed(begun, **same) == (CONFIG, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", "2"), ("optimizer", "sgd"), ("param_dtype", "bf16"), ("moment_dtype", "bf16")],
)
def test_what_checkpoints_depend_on_cannot_change(begun, name, value):
    with pytest.raises(
        MeshwrightError, match=f"^{name} is {value if name == 'num_layers' else repr(value)}; the check"
    ):
        resumed(begun, change=True, **{name: value})


def test_the_end_asked_for_is_the_end_and_the_schedule_is_never_run_past_its_own(begun):
    assert resumed(begun) == (CONFIG, [])
    config, lines = resumed(begun, steps="4")
    assert (config.steps, config.optimizer.decay_steps) == (4, 40)
    assert lines == ["stops at step 4; the schedule of the learning rate still ends at 40, it is 0.00298 there"]
    config, lines = resumed(begun, steps="80", save_every=5)
    assert (config.steps, config.optimizer.decay_steps, config.saving.every) == (80, 80, 5)
    assert lines == ["the schedule of the learning rate is stretched from 40 to 80 steps, where it ends"]


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(warmup_steps=0), Optimizer(decay_steps=3)])
def test_the_rate_without_jax_is_that_of_the_schedule(optimizer):
    schedule = optimizer.optax_schedule()
    for step in (0, 1, 19, 20, 21, 100, 199, 200, 1000):
        assert optimizer.rate(step) == pytest.approx(float(schedule(step)), rel=1e-5)


def test_a_run_made_before_a_field_existed_goes_on_with_its_default():
    def without_defaults(data, of):
        """Plain data as it was before its dataclass had any field with a default."""
        required = {each.name for each in fields(of) if each.default is MISSING and each.default_factory is MISSING}
        return {name: value for name, value in data.items() if name in required}

    data = CONFIG.to_json()
    model, strategy = CONFIG.workload.model, CONFIG.strategy
    data["workload"]["model"] = without_defaults(data["workload"]["model"], type(model))
    data["strategy"] = without_defaults(data["strategy"], type(strategy))
    before = replace(CONFIG, workload=replace(CONFIG.workload, model=replace(model, family=Family())))
    assert config_differences(before, data) == []
    assert config_differences(replace(before, workload=replace(before.workload, param_dtype="bf16")), data)


def test_a_config_is_the_same_after_a_file(begun):
    other = replace(CONFIG, strategy=Strategy(dropout=0.5), hardware_file=str(DATA / "cpu.toml"))
    begin_run(begun, other, 0)
    assert read_config(begun) == other


def test_a_config_of_before_settings_were_grouped_is_read():
    data = CONFIG.to_json()
    data["save_every"], data["data"] = data.pop("saving")["every"], ["README.md"]
    read = config_from_data(data)
    assert (read.saving.every, read.data.sources) == (CONFIG.saving.every, ("README.md",))


def test_every_option_of_a_run_is_a_setting_with_a_field():
    names = set(TrainOptions.__annotations__) - set(PlanOptions.__annotations__)
    assert names | {"adapter"} == set(SETTINGS)  # A plan takes adapters too, whose sizes it needs.
    for name in SETTINGS:
        get_setting(CONFIG, name)


def test_damaged_lines_of_metrics_are_left_out_with_a_note(tmp_path):
    measured = {"mesh": "fsdp=8", "hardware": "cpu:8", "step_seconds": 1.0, "memory_peak_bytes": None}
    lines = [json.dumps({"step": step} | measured) for step in range(3)]
    later = json.dumps({"step": 1, "save_seconds": 2.0})
    text = "\n".join([lines[0], lines[1].replace(":", ";", 1), later, lines[2], '{"step": 3, "me'])
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(MeshwrightError, match="line 2: this is not a line of metrics"):
        read_metrics(tmp_path)
    notes = []
    repair_lines(tmp_path, notes.append)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 2]
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == text
    assert len(notes) == 1
    assert "metrics.jsonl: 2 damaged lines are left out; the file as it was is" in notes[0]
    repair_lines(tmp_path, notes.append)
    assert len(notes) == 1


@pytest.mark.parametrize("name", ["sources", "eval_tasks", "bad_data"])
@pytest.mark.parametrize("value", [[], 1.0, {"a": 1}, {"a": {"tokdns": "x"}}])
def test_figures_by_source_or_task_that_are_none_are_damaged_lines(name, value, tmp_path):
    """A flipped bit in such a name ended `meshwright report` with a traceback."""
    row = {"step": 0, "mesh": "fsdp=8", "hardware": "cpu:8", "step_seconds": 1.0, "memory_peak_bytes": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {name: value}) + "\n")
    with pytest.raises(MeshwrightError, match=f"line 1: this is not a line of metrics: {name} is"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(("content", "line"), [(None, "is missing"), ('{"steps": ', "is not the config of a run")])
def test_a_lost_config_is_named_with_its_copy(content, line, tmp_path):
    for step in (2, 10):
        copy = tmp_path / "checkpoints" / str(step) / "config" / "metadata"
        copy.parent.mkdir(parents=True)
        copy.write_text(json.dumps(tiny_run.CONFIG.to_json()))
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(MeshwrightError, match=rf"config.json {line}.*checkpoint 10 has a copy of it") as found:
        read_config(tmp_path)
    subprocess.run(str(found.value).split("`")[1], shell=True, check=True)
    assert read_config(tmp_path) == tiny_run.CONFIG


def test_each_difference_of_a_run_that_goes_on_is_said(tmp_path):
    begin_run(tmp_path, tiny_run.CONFIG, 0)
    options = {"seq_len": 32, "optimizer": "lion", "param_dtype": "bf16"}
    with pytest.raises(MeshwrightError, match=r"seq_len is 32.*; optimizer is 'lion'.*; param_dtype is 'bf16'"):
        resumed_run(tmp_path, steps=None, change=False, options=options)
