"""A run of two processes on one machine, each with half of the devices, beside the same run of one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from meshwright.cli.main import main
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.launch.supervisor import free_ports
from meshwright.execution.processes.options import Processes
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.training.watch.profile import read_profile
from meshwright.pictures.report import report

TEXT = "".join(f"{number} squared is {number**2}.\n" for number in range(400))
LLAMA = str(Path(__file__).parents[2] / "references" / "llama")
ARGUMENTS = ["train", "tiny", "--on", "cpu:4", "--mesh", "2,2,1,1", "--num-layers", "1", "--batch", "4"]
ARGUMENTS += ["--seq-len", "32", "--steps", "3"]


def start(directory, *more):
    """A process that trains."""
    (directory / "text.txt").write_text(TEXT)
    program = "from meshwright.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, *ARGUMENTS, "--data", str(directory / "text.txt"), *more]
    return subprocess.Popen(command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def losses(directory):
    """The loss of each step of a run."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    port, run = free_ports(), tmp_path / "two"
    meet = ["-o", str(run), "--coordinator", f"localhost:{port}", "--num-processes", "2"]
    processes = [start(tmp_path, *meet, "--process-id", str(number)) for number in range(2)]
    try:
        said = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert ["mesh dp=2,fsdp=2" in out for out, _ in said] == [True, False]
    alone = start(tmp_path, "-o", str(tmp_path / "one"))
    told = alone.communicate(timeout=400)
    assert alone.returncode == 0, told
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(run)) == 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]


def launch(directory, count, arguments, *more):
    """A supervised run of several processes, its directory `run`; the steps are few, and each is saved."""
    (directory / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "meshwright", "launch", "-n", str(count), *more, "--", *arguments]
    command += ["--data", str(directory / "text.txt"), "-o", str(directory / "run")]
    with (directory / "stderr").open("w") as err, (directory / "stdout").open("w") as out:
        return subprocess.Popen(command, cwd=directory, stdout=out, stderr=err)


def wait_for(what, launched, seconds=300):
    """Wait until something is true of a job that runs."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        assert launched.poll() is None
        time.sleep(0.1)


def child_of(launched, number):
    """The id of a process that `meshwright launch` started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == launched.pid and words[-3:-1] == ["--process-id", str(number)]:
                return int(entry.name)
    raise AssertionError(f"no process {number}")


def is_saved(run):
    """Whether a run has a whole checkpoint: it has begun the one after."""
    return sum(path.name.isdigit() for path in (run / "checkpoints").glob("*")) > 1


def lose(launched, directory, number, how):
    """Send a process a signal once there is a checkpoint; how long it was until it was named, and all that was said."""
    err = directory / "stderr"
    wait_for(lambda: is_saved(directory / "run"), launched)
    os.kill(child_of(launched, number), how)
    began = time.monotonic()
    wait_for(lambda: "launch: process" in err.read_text(), launched)
    took = time.monotonic() - began
    launched.wait(timeout=400)
    return took, err.read_text()


SMALL = ["train", "tiny", "--num-layers", "1", "--batch", "8", "--seq-len", "16"]


@pytest.mark.matrix
def test_four_processes_of_two_devices_have_the_losses_of_one_of_eight(tmp_path):
    arguments = [*SMALL, "--on", "cpu:8", "--mesh", "2,2,2,1", "--steps", "4"]
    launched = launch(tmp_path, 4, arguments)
    assert launched.wait(timeout=500) == 0, (tmp_path / "stderr").read_text()
    assert "Gloo" not in (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()
    command = [sys.executable, "-m", "meshwright", *arguments, "--data", "text.txt", "-o", "one"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=400)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.matrix
def test_the_profile_of_two_processes_has_the_devices_of_both(tmp_path):
    arguments = [*SMALL, "--on", "cpu:4", "--mesh", "2,2,1,1", "--steps", "4", "--profile", "2:3"]
    launched = launch(tmp_path, 2, arguments)
    assert launched.wait(timeout=500) == 0, (tmp_path / "stderr").read_text()
    profile = read_profile(tmp_path / "run")
    assert sorted(profile.devices) == list("0123")
    assert all(0 < use["busy_seconds"] <= use["step_seconds"] for use in profile.devices.values())
    assert profile.measured.notes == ()
    compiled, measured = profile.compiled.collectives, profile.measured.collectives
    assert [(c.kind, c.axes, c.phase, c.bytes, c.count) for c in measured] == [
        (c.kind, c.axes, c.phase, c.bytes, c.count) for c in compiled
    ]
    assert all(f"device {number}" in report(tmp_path / "run") for number in range(4))
    for folder in ("profile", "profile/process-1"):
        [_] = (tmp_path / "run" / folder).glob("plugins/profile/*/*.xplane.pb")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("count", "devices", "mesh", "number", "how", "expected"),
    [
        (2, 2, "2,1,1,1", 1, signal.SIGKILL, r"launch: process 1 \(pid \d+\) was ended by SIGKILL after step \d+"),
        (4, 8, "2,2,2,1", 2, signal.SIGKILL, r"launch: process 2 \(pid \d+\) was ended by SIGKILL after step \d+"),
        (
            2, 2, "2,1,1,1", 1, signal.SIGSTOP,
            r"launch: process 1 \(.*\) has not answered for 2\d s .*it is stopped \(SIGSTOP\)",
        ),
    ],
)  # fmt: skip
def test_a_lost_process_is_named_and_the_run_is_finished(tmp_path, count, devices, mesh, number, how, expected):
    arguments = [*SMALL, "--on", f"cpu:{devices}", "--mesh", mesh, "--steps", "40", "--save-every", "4"]
    launched = launch(tmp_path, count, arguments)
    took, said = lose(launched, tmp_path, number, how)
    assert re.match(expected, said), said
    assert took < 30
    assert launched.returncode == 0, said
    assert f"{count} processes continue from checkpoint" in said
    rows = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert sorted(set(steps)) == list(range(40))


@pytest.mark.matrix
def test_an_elastic_run_goes_on_with_half_of_the_devices_and_the_same_batch(tmp_path):
    arguments = [*SMALL, "--on", "cpu:4", "--mesh", "1,-1,1,1", "--steps", "40", "--save-every", "4"]
    launched = launch(tmp_path, 2, arguments, "--elastic", "1")
    _, said = lose(launched, tmp_path, 1, signal.SIGKILL)
    assert launched.returncode == 0, said
    assert "1 process continues from checkpoint" in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["hardware"], config["mesh"]["fsdp"], config["workload"]["batch"]) == ("cpu:2", 2, 8)


@pytest.mark.matrix
def test_sigterm_is_passed_on_and_the_run_is_saved(tmp_path):
    launched = launch(tmp_path, 2, [*SMALL, "--on", "cpu:2", "--steps", "100000", "--save-every", "4"])
    wait_for(lambda: is_saved(tmp_path / "run"), launched)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(timeout=120) == 0, (tmp_path / "stderr").read_text()
    assert "stopped at" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "--", "plan", "tiny"], "launch runs train, serve or a script.py, and not 'plan'"),
        (
            ["-n", "2", "--", "train", "tiny", "--on", "cpu:3", "--batch", "6"],
            "3 devices cannot be divided equally among 2 processes",
        ),
        (["-n", "2", "--elastic", "3", "--", "train", "tiny", "--on", "cpu:4"], "--elastic 3 of 2 processes"),
        (["-n", "0", "--", "train", "tiny", "--on", "cpu:4"], "-n is 0; it is the number of processes, from 1"),
        (["-n", "2", "--", "train", "tiny", "--process-id", "0"], "--process-id is set by launch itself"),
        (["-n", "2", "--", "train", "tiny", "--no-such"], "there is no option --no-such"),
        (["-n", "2", "--", "train", "tiny", "--dry-run"], "leave launch out"),
        (["-n", "2", "--elastic", "1", "--", "serve", LLAMA, "--on", "cpu:2"], "--elastic has no effect for serve"),
        (["-n", "3", "--", "serve", LLAMA, "--on", "cpu:4"], "4 devices cannot be divided equally among 3 processes"),
        (["-n", "2", "--", "serve", LLAMA, "--replicas", "2"], "--replicas 2 starts processes of its own"),
        (["-n", "2", "--", "serve", LLAMA, "--process-id", "1"], "--process-id is set by launch itself"),
        (["-n", "2"], "SCRIPT … is missing|launch runs train, serve or a script.py, and not 'nothing'"),
        (["-n", "4", "--", "train", "llama3-8b", "--on", "v5e:4x4", "--batch", "16"], "one process drives all chips"),
    ],
)
def test_what_launch_refuses_is_one_line(words, message, capsys):
    assert main(["launch", *words]) == 2
    line = capsys.readouterr().err
    assert re.search(message, line), line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (("localhost:1", 2), "needs --num-processes, from 1, and --process-id, .* they are 2 and None"),
        (("localhost:1", 2, 2), "they are 2 and 2"),
        (("localhost:1", 3, 0), "4 devices cannot be divided equally among 3 processes"),
        ((None, 2, 0), "go with --coordinator HOST:PORT"),
        (("auto", 2, 0), "not with auto"),
        (("garbage", 2, 0), "--coordinator garbage is not HOST:PORT"),
        (("localhost:0", 2, 0), "is not HOST:PORT"),
        ((":12", 2, 0), "is not HOST:PORT"),
    ],
)
def test_processes_that_cannot_meet_are_one_clear_error(said, message):
    with pytest.raises(MeshwrightError, match=message):
        claim_devices(parse_system("cpu:4"), Processes(*said))


def test_auto_where_no_cluster_is_known_is_one_clear_error(monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(MeshwrightError, match="--coordinator auto: this is not a job step of Slurm, not a Cloud TPU"):
        claim_devices(parse_system("cpu:4"), Processes("auto"))
