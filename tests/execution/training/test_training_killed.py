"""A run that is killed with kill -9 and started again is the run that was not, to the bit.

`benchmarks/faults.py` kills runs of every kind at random moments.
"""

import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from test_training_moves import DATA

from meshwright.description.step.rules import rules_of
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.frozen import abstract_parts
from meshwright.execution.training.run_directory.run import read_config, read_metrics
from meshwright.execution.training.slots import in_order
from meshwright.execution.training.step import abstract_state

STEPS, KILLED_AFTER = 100, 40
OPTIONS = ["--on", "cpu:8", "--mesh", "2,2,2,1", "--batch", "8", "--seq-len", "32", "--save-every", str(KILLED_AFTER)]


def start(words, run):
    """A process that begins a run, or continues with it."""
    command = [sys.executable, "-m", "meshwright", "train", *words, *OPTIONS, "--steps", str(STEPS), "--resume"]
    return subprocess.Popen([*command, "-o", str(run)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(words, run):
    """Train to the end; what was said."""
    process = start(words, run)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return said


def kill(words, run):
    """Train until a checkpoint is there, and kill the process while it continues."""
    process = start(words, run)
    try:
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / str(KILLED_AFTER)).is_dir():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def last_state(run, steps=STEPS):
    """What the checkpoint after the last step holds, by its paths: parameters and moments, layers in their order."""
    config = read_config(run)
    mesh, layout = build_mesh(config.mesh), ShardingContext(config.mesh, rules_of(config.strategy))
    saved = in_order(layout, config.workload.config, config.strategy)
    with jax.set_mesh(mesh):
        wanted = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
        state = Checkpoints(run).restore(steps, abstract_parts(config, wanted, mesh))
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in jax.tree.leaves_with_path(state)}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", DATA)
def test_a_killed_run_has_the_losses_and_parameters_of_one_that_was_not(tmp_path, kind):
    words = DATA[kind](tmp_path)
    finish(words, tmp_path / "straight")
    kill(words, tmp_path / "killed")
    before = [row["step"] for row in read_metrics(tmp_path / "killed")]
    assert KILLED_AFTER <= len(before) < STEPS
    assert f"from checkpoint {KILLED_AFTER}" in finish(words, tmp_path / "killed")
    losses = [[row["loss"] for row in read_metrics(tmp_path / run)] for run in ("straight", "killed")]
    assert len(losses[0]) == STEPS
    assert losses[1] == losses[0]
    assert losses[0][-1] < losses[0][0]
    straight, killed = last_state(tmp_path / "straight"), last_state(tmp_path / "killed")
    assert straight.keys() == killed.keys()
    for path, array in straight.items():
        assert np.array_equal(array, killed[path]), path
