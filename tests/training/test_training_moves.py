"""A run that goes from mesh to mesh and to several processes reads the same tokens in the same order."""

import json
import socket
import subprocess
import sys

import pytest

STEPS = 9
TEXT = "".join(f"{number} squared is {number**2}.\n" for number in range(2000))


def text(directory):
    (directory / "text.txt").write_text(TEXT)
    return ["--data", str(directory / "text.txt")]


DATA = {"text": text}
"""By its name, what makes data in a directory and has the options that name it."""


def train(words, steps, processes=1):
    """Train to so many steps in some processes that share 8 devices."""
    command = [sys.executable, "-c", "from meshwright.cli.main import main; raise SystemExit(main())", "train", "tiny"]
    command += ["--on", "cpu:8", "--batch", "8", "--seq-len", "32", "--num-layers", "2", "--lr-schedule", "constant"]
    command += ["--steps", str(steps), "--resume", *words]
    numbered = [command]
    if processes > 1:
        with socket.socket() as listening:
            listening.bind(("localhost", 0))
            meet = ["--coordinator", f"localhost:{listening.getsockname()[1]}", "--num-processes", str(processes)]
        numbered = [[*command, *meet, "--process-id", str(number)] for number in range(processes)]
    begun = [subprocess.Popen(each, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for each in numbered]
    try:
        said = [process.communicate(timeout=400) for process in begun]
    finally:
        for process in begun:
            process.kill()
    assert [process.returncode for process in begun] == [0] * processes, said


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", DATA)
def test_a_run_that_moves_reads_the_tokens_of_one_that_does_not(tmp_path, kind):
    data = DATA[kind](tmp_path)
    train([*data, "-o", str(tmp_path / "stays"), "--mesh", "1,8,1,1"], STEPS)
    moves = [*data, "-o", str(tmp_path / "moves"), "--mesh"]
    train([*moves, "2,2,2,1"], 3)
    train([*moves, "1,8,1,1"], 6)
    train([*moves, "1,8,1,1"], STEPS, processes=4)
    assert len(losses(tmp_path / "moves")) == STEPS
    assert losses(tmp_path / "moves") == pytest.approx(losses(tmp_path / "stays"), abs=1e-4)
