"""What is kept of a run for people: its rows in every writer, and where its time went over restarts."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.description.families.registry import PRESETS
from meshwright.description.hlo import versions
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.library import train
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.watch.goodput import ACCOUNTS, goodput, read_restarts
from meshwright.execution.training.watch.log import RunLog, scalars
from meshwright.execution.training.watching import WatchConfig
from meshwright.mesh import MeshShape
from meshwright.record import Record

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1), batch=8, seq_len=32, compute_dtype="f32"
)
CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=6),
    steps=5,
    saving=Saving(every=2),
)


class PowerCutError(Exception):
    """Ends a run as a power cut does: nothing is saved."""


def cut_after(taken):
    """What ends a run after so many steps."""

    def on_step(row):
        if row["step"] + 1 == taken:
            raise PowerCutError

    return on_step


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run that lost its fourth step, after a checkpoint at the second, and was gone on with; and its two starts."""
    directory, began = tmp_path_factory.mktemp("run"), [time.time()]
    with pytest.raises(PowerCutError):
        train(CONFIG, directory, on_step=cut_after(4))
    time.sleep(0.3)
    began.append(time.time())
    with pytest.warns(UserWarning, match="are taken again"):
        train(CONFIG, directory)
    return directory, began


def test_every_second_of_a_run_is_in_one_account(broken):
    directory, (began, _) = broken
    rows, restarts = read_metrics(directory), read_restarts(directory)
    assert [row["step"] for row in rows] == list(range(5))
    [restart] = restarts
    start = restart["start"]
    assert restart["lost_steps"] == 4 - start
    found = goodput(rows, restarts)
    assert found.keys() == ACCOUNTS.keys()
    ended = rows[-1]["time"] + rows[-1]["save_seconds"]
    # Before the first account a config is checked and text read.
    assert sum(found.values()) == pytest.approx(ended - began, abs=0.3)
    assert sum(found.values()) < ended - began
    assert found["down"] >= 0.3
    assert found["lost steps"] > 0
    assert found["compiling"] == pytest.approx(sum(row.get("compile_seconds", 0) for row in rows))
    assert found["saving"] == pytest.approx(sum(row.get("save_seconds", 0) for row in rows))
    assert found["saving"] > 0
    assert all(seconds >= 0 for seconds in found.values())


def test_time_lost_before_a_first_checkpoint_is_all_of_it():
    """Of the process that was lost; hand-made rows, so that each second is known."""
    row = {"step_seconds": 1.0, "input_seconds": 0.25}
    kept = [
        row | {"step": 0, "time": 110.0, "startup_seconds": 4.0, "compile_seconds": 5.0},
        row | {"step": 1, "time": 112.0, "save_seconds": 0.5},
    ]
    restarts = [{"lost_seconds": 30.0, "down_seconds": 7.0}]
    assert goodput(kept, restarts) == {
        "steps": 1.5, "input": 0.5, "compiling": 5.0, "saving": 0.5, "evaluation": 0.0, "starting": 4.0,
        "lost steps": 30.0, "down": 7.0, "other": 1.0,
    }  # fmt: skip
    # A row of an older version has no time, and is in no account.
    assert not any(goodput([row | {"step": 0}], []).values())


def test_tensorboard_reads_each_step_once(broken):
    directory, _ = broken
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    rows = read_metrics(directory)
    for tag, name in (("train/loss", "loss"), ("speed/mfu", "mfu"), ("train/grad_norm", "grad_norm")):
        found = events.Scalars(tag)
        assert [event.step for event in found] == [1, 2, 3, 4, 5]
        assert [event.value for event in found] == pytest.approx([row[name] for row in rows], rel=1e-6)
    assert [event.step for event in events.Scalars("speed/save_seconds")] == [2, 4, 5]
    assert len(list((directory / "tensorboard").iterdir())) == 2


def test_what_is_no_number_is_no_scalar():
    row = {"step": 3, "time": 1.0, "loss": 2, "mesh": "fsdp=8", "memory_peak_bytes": None, "eval_loss": 1.5}
    assert scalars({"eval_tasks": {"sums": {"questions": 1, "acc": 1.0, "acc_stderr": None}}}) == {"eval/sums/acc": 1.0}
    assert scalars(row | {"mfu": 0.5}) == {"train/loss": 2.0, "eval/loss": 1.5, "speed/mfu": 0.5}


class FakeWandb:
    """As much of the library of Weights & Biases as a run calls."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        run = SimpleNamespace(id=options.get("id", "abc123"), options=options, logged=[], finished=False)
        run.log = lambda values, step: run.logged.append((step, values))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


def logged(directory, steps, notes):
    """Rows of some steps on their way to Weights & Biases."""
    with RunLog(directory, notes.append, wandb="curves", config=CONFIG.to_json()) as log:
        log.begin(steps.start, Record(origin="compiled", mesh={}, hardware="cpu:8"))
        for step in steps:
            log.add({"step": step, "time": 1.0, "loss": 2.0})
        log.add_later({"save_seconds": 0.5})


def test_weights_and_biases_gets_the_rows_and_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    fake, notes = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logged(tmp_path, range(2), notes)
    logged(tmp_path, range(2, 3), notes)
    first, second = fake.runs
    assert first.options["project"] == "curves"
    assert first.options["config"]["seed"] == 0
    assert (second.options["id"], second.options["resume"]) == ("abc123", "allow")
    assert [step for run in fake.runs for step, values in run.logged if "train/loss" in values] == [1, 2, 3]
    assert second.logged[-1] == (3, {"speed/save_seconds": 0.5, "_timestamp": 1.0})
    assert first.finished
    assert second.finished
    assert notes == []


def test_weights_and_biases_that_cannot_be_reached_does_not_end_a_run(tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("api.wandb.ai: name resolution failed\nmore")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    notes = []
    logged(tmp_path, range(2), notes)
    assert notes == [
        "Weights & Biases cannot be reached: api.wandb.ai: name resolution failed; the run continues without it"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_library_that_is_not_installed_is_one_line_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MeshwrightError, match=r"--wandb needs the library .*: pip install wandb"):
        train(replace(CONFIG, watching=WatchConfig(wandb="curves")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_measured_after_a_row_joins_it(tmp_path):
    row = {"step": 0, "mesh": "", "hardware": "", "step_seconds": 1.0, "memory_peak_bytes": None}
    lines = [row, {"step": 0, "eval_loss": 2.0}, row | {"step": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [row | {"eval_loss": 2.0}, row | {"step": 1}]
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "eval_loss": 2.0}\n')
    with pytest.raises(MeshwrightError, match=r"line 1: this is not a line of metrics"):
        read_metrics(tmp_path)


def test_a_run_with_a_jax_that_no_test_has_seen_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "0.13.0")
    notes: list[str] = []
    run_steps(replace(tiny_run.CONFIG, steps=2), tmp_path / "run", on_note=notes.append)
    assert sum("not tested with JAX 0.13.0" in note for note in notes) == 1
