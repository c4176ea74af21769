"""A run of two processes on one machine, each with half of the devices, beside the same run of one."""

import json
import socket
import subprocess
import sys

import pytest

from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.processes import Processes
from meshwright.runtime import claim_devices

TEXT = "".join(f"{number} squared is {number**2}.\n" for number in range(400))
ARGUMENTS = ["train", "tiny", "--on", "cpu:4", "--mesh", "2,2,1,1", "--num-layers", "1", "--batch", "4"]
ARGUMENTS += ["--seq-len", "32", "--steps", "3"]


def start(directory, *more):
    """A process that trains."""
    (directory / "text.txt").write_text(TEXT)
    program = "from meshwright.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, *ARGUMENTS, "--data", str(directory / "text.txt"), *more]
    return subprocess.Popen(command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def losses(directory):
    """The loss of each step of a run."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    port, run = free_port(), tmp_path / "two"
    meet = ["-o", str(run), "--coordinator", f"localhost:{port}", "--num-processes", "2"]
    processes = [start(tmp_path, *meet, "--process-id", str(number)) for number in range(2)]
    try:
        said = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert ["plan" in out for out, _ in said] == [True, False]
    alone = start(tmp_path, "-o", str(tmp_path / "one"))
    told = alone.communicate(timeout=400)
    assert alone.returncode == 0, told
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(run)) == 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (("localhost:1", 2), "wants --num-processes, from 1, and --process-id, .* they are 2 and None"),
        (("localhost:1", 2, 2), "they are 2 and 2"),
        (("localhost:1", 3, 0), "3 processes cannot have the same part of 4 devices"),
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
