"""Checkpoints while a run trains: which are kept, what is measured, and a disk that is full for a while."""

from dataclasses import replace

import pytest
import tiny_run

from meshwright.errors import MeshwrightError
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory import checkpoint as checkpoint_module
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.run import RunStoppedError, read_metrics
from meshwright.execution.training.run_directory.saver import Saver
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.settings import with_settings
from meshwright.support.files import append_line

CONFIG = replace(tiny_run.CONFIG, saving=Saving(every=1, keep=1, keep_every=3))


@pytest.mark.parametrize(
    ("keep", "keep_every", "steps", "kept"),
    [
        (2, 0, [2, 4, 6], {4, 6}),
        (1, 0, [2, 4, 6], {6}),
        (5, 0, [2, 4, 6], {2, 4, 6}),
        (1, 4, [2, 4, 6, 8, 10], {4, 8, 10}),
        (1, 5, [2, 4, 6, 8, 10, 11, 13], {6, 10, 13}),
        (2, 1000, [900, 1200, 1500, 1800], {1200, 1500, 1800}),
        (1, 3, [], set()),
    ],
)
def test_the_last_are_kept_and_the_first_of_every_so_many_steps(keep, keep_every, steps, kept):
    assert Saving(keep=keep, keep_every=keep_every).kept(steps) == kept


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 0), ("keep_every", -1), ("minutes", -0.5), ("grace_seconds", 0.0)]
)
def test_what_no_saving_is_is_one_line(name, value):
    with pytest.raises(MeshwrightError, match=f"{name} is {value:g}; it is a"):
        Saving(**{name: value})


@pytest.mark.parametrize(
    ("said", "every", "minutes"),
    [(500, 500, 0), ("1k", 1000, 0), ("30m", 0, 30), ("1h", 0, 60), ("90s", 0, 1.5), ("0", 0, 0), (0, 0, 0)],
)
def test_steps_or_a_time_between_checkpoints(said, every, minutes):
    saving = with_settings(CONFIG, {"save_every": said}).saving
    assert (saving.every, saving.minutes) == (every, minutes)


@pytest.mark.parametrize("said", ["30x", "-5", -5, "m", 2.5, "-1h", ""])
def test_what_is_neither_steps_nor_a_time_is_one_line(said):
    with pytest.raises(MeshwrightError, match=r"save_every is .*; it is a number of steps, as 500, a time, as 30m"):
        with_settings(CONFIG, {"save_every": said})


def test_a_run_of_which_nothing_is_said_saves_by_the_clock():
    assert Saving() == Saving(every=0, minutes=30.0)


def test_a_run_keeps_what_it_is_told_and_measures_what_it_waited_for(tmp_path):
    left = tmp_path / "run" / "checkpoints" / "9.partial"
    left.mkdir(parents=True)
    run_steps(CONFIG, tmp_path / "run")
    assert sorted(path.name for path in left.parent.iterdir()) == ["3", "6"]
    rows = read_metrics(tmp_path / "run")
    for row in rows:
        assert row["save_seconds"] > 0
        assert row["save_background_seconds"] > 0
    # The last is waited for, and its background with it.
    assert rows[-1]["save_seconds"] > rows[-1]["save_background_seconds"]


def test_minutes_between_checkpoints_are_those_of_a_clock_that_nobody_sets(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("meshwright.execution.training.run_directory.saver.time.monotonic", lambda: now[0])

    def pass_time(_):
        now[0] += 25.0

    monkeypatch.setattr("meshwright.execution.training.watch.log.RunLog.flush", lambda _: None)
    written = []
    monkeypatch.setattr(Checkpoints, "save", lambda _, step, *__: written.append(step))
    monkeypatch.setattr(Checkpoints, "commit", lambda _: None)
    run_steps(replace(CONFIG, saving=Saving(minutes=1.0), steps=8), tmp_path / "run", on_step=pass_time)
    assert written == [3, 6, 8]


def test_a_disk_that_is_full_for_a_while_costs_a_run_its_checkpoints_of_that_time_alone(tmp_path, monkeypatch):
    """Of the checkpoints after steps 1 to 6 those of 2 and 3 do not fit; and the rows of 3 and 4 do not either."""
    free, notes = checkpoint_module.check_free, []

    def check_free(directory, state, *, what):
        if what in ("write checkpoint 2", "write checkpoint 3"):
            raise MeshwrightError(f"cannot {what}: the disk is full")
        free(directory, state, what=what)

    def append(path, line):
        if full:
            raise MeshwrightError(f"cannot write {path}: the disk is full")
        append_line(path, line)

    full = []

    def step(row):
        full[:] = [True] * (row["step"] in (1, 2))

    monkeypatch.setattr("meshwright.execution.training.run_directory.checkpoint.check_free", check_free)
    monkeypatch.setattr("meshwright.execution.training.run_directory.run.append_line", append)
    run_steps(CONFIG, tmp_path / "run", on_step=step, on_note=notes.append)
    goes_on = "training continues and tries again at its next checkpoint"
    assert notes == [
        f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}: the disk is full; training continues, and its metrics are"
        " kept until they can be written",
        f"cannot write checkpoint 2: the disk is full; {goes_on} (1 not written)",
        f"cannot write checkpoint 3: the disk is full; {goes_on} (2 not written)",
    ]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(6))
    assert [row.get("failed_saves") for row in rows] == [None, 1, 2, None, None, None]
    assert Checkpoints(tmp_path / "run").steps == [4, 6]
    assert Checkpoints(tmp_path / "run").whole(pytest.fail) == 6


def test_a_write_that_fails_in_the_background_is_one_line(tmp_path, monkeypatch):
    """TensorStore's own is a line of 600 characters, with the number of the system's error near its end."""
    text = f"OUT_OF_RANGE: Error writing {'x' * 400}: Failed to write 9 bytes: File too large [os_error_code='27']"
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints, "_finish", lambda: setattr(checkpoints, "_failure", ValueError(text)))
    checkpoints.commit()
    with pytest.raises(MeshwrightError, match=r"checkpoints/0: a file is larger than it may be \(ulimit -f\)$"):
        checkpoints.wait()


def test_one_of_several_processes_that_cannot_write_its_part_ends_the_run(tmp_path, monkeypatch):
    """The others would wait for it, 20 minutes by Orbax's clock."""

    class Full:
        def check(self):
            raise MeshwrightError("cannot write checkpoint 2: the disk is full")

    notes = []
    saver = Saver(CONFIG.saving, tmp_path, Full(), lambda state: state, lambda taken: {}, None, notes.append)
    saver.check()
    assert len(notes) == 1
    monkeypatch.setattr("meshwright.execution.training.run_directory.saver.jax.process_count", lambda: 2)
    with pytest.raises(MeshwrightError, match=r"cannot write checkpoint 2: the disk is full$"):
        saver.check()


@pytest.mark.matrix
def test_a_run_whose_last_checkpoint_cannot_be_written_ends_with_one_line(tmp_path, monkeypatch):
    def full(directory, state, *, what):
        if what == "write checkpoint 6":
            raise MeshwrightError(f"cannot {what}: the disk is full")

    monkeypatch.setattr("meshwright.execution.training.run_directory.checkpoint.check_free", full)
    monkeypatch.setattr("meshwright.execution.training.loop.check_free", full)
    with pytest.raises(RunStoppedError, match=r"cannot write checkpoint 6: the disk is full; training stops; the last"):
        run_steps(CONFIG, tmp_path / "run")
    assert Checkpoints(tmp_path / "run").whole(pytest.fail) == 5
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["3", "5"]


@pytest.mark.matrix
def test_a_run_directory_that_is_removed_ends_the_run(tmp_path):
    def remove(row):
        if row["step"] == 2:
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(RunStoppedError, match=r"there is no directory .*run; training stops"):
        run_steps(replace(CONFIG, saving=Saving()), tmp_path / "run", on_step=remove, on_note=pytest.fail)
    assert not (tmp_path / "run").exists()
