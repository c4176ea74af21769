"""A script that calls `mw.fit`, as several processes: what is lost comes back, and signals save."""

import json
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw

out, lost_at, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def step(state, rows):
    def loss(w):
        return ((jnp.tanh(rows @ w["a"]) @ w["b"] - rows) ** 2).mean()
    found, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), found

def make():
    a, b = jax.random.split(jax.random.key(0))
    return {"a": 0.1 * jax.random.normal(a, (16, 64)), "b": 0.1 * jax.random.normal(b, (64, 16))}

def batch(number):
    return np.random.default_rng(number).normal(size=(32, 16)).astype(np.float32)

def on_step(row):
    time.sleep(pause)
    if row["step"] == lost_at and jax.process_index() == 1 and not os.path.exists(out + ".lost"):
        while not os.path.isdir(out + "/checkpoints/3"):
            time.sleep(0.05)
        open(out + ".lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

plan = mw.plan(step, jax.eval_shape(make), batch(0), on=f"cpu:{jax.device_count()}", num_compiled=0)
mw.fit(step, make, batch, plan=plan, out=out, steps=9, save_every=3, resume=True, on_step=on_step)
"""


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    started = []

    def start(*words, options=()):
        command = [sys.executable, "-m", "meshwright", "launch", "-n", "2", *options, "--", *map(str, words)]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def losses(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.matrix
def test_a_lost_process_is_named_and_the_run_has_the_losses_of_an_unbroken_one(launch, tmp_path):
    whole = launch("mine.py", "whole", -1, 0, options=("--on", "cpu:4"))
    assert whole.wait(120) == 0, whole.stderr.read()
    again = launch("mine.py", "again", 4, 0, options=("--on", "cpu:4"))
    _, err = again.communicate(timeout=180)
    assert again.returncode == 0, err
    assert "launch: process 1 (pid " in err
    assert "2 processes continue from checkpoint 3" in err
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    fewer = launch("mine.py", "fewer", 4, 0, options=("--on", "cpu:4", "--elastic", "1"))
    _, err = fewer.communicate(timeout=180)
    assert fewer.returncode == 0, err
    assert "1 process continues from checkpoint 3" in err
    assert losses(tmp_path / "fewer") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.matrix
def test_sigterm_saves_and_ends_with_0_and_the_same_command_goes_on(launch, tmp_path):
    stopped = launch("mine.py", "run", -1, 0.5, options=("--on", "cpu:4"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("loss")) and time.monotonic() < until:
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 0, err
    assert "stopped by SIGTERM after " in err
    more = launch("mine.py", "run", -1, 0, options=("--on", "cpu:4"))
    assert more.wait(120) == 0, more.stderr.read()
    assert sorted(losses(tmp_path / "run")) == [*range(9)]


@pytest.mark.matrix
def test_a_script_that_ends_with_a_code_ends_the_job_with_one_line(launch, tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    ended = launch("bad.py", options=("--on", "cpu:2"))
    _, err = ended.communicate(timeout=60)
    assert (ended.returncode, err) == (1, "error: bad.py ended with 3\n")


@pytest.mark.parametrize(
    ("words", "options", "line"),
    [
        (("mine.py",), (), "launch of a script needs --on, the devices of all processes: --on cpu:8 -- mine.py …"),
        (("nope.py",), ("--on", "cpu:2"), "there is no file nope.py"),
        (("mine.py",), ("--on", "cpu:3"), "3 devices cannot be divided equally among 2 processes"),
        (("mine.py",), ("--on", "cpu:2", "--slurm"), "--slurm has no effect for a script; leave it out"),
        (("eval",), (), "launch runs train, serve or a script.py, and not 'eval': meshwright launch -n 4 -- train …"),
    ],
)
def test_what_cannot_be_launched_is_refused(launch, words, options, line):
    ended = launch(*words, options=options)
    _, err = ended.communicate(timeout=60)
    assert (ended.returncode, err.splitlines()) == (2, [f"error: {line}"])
