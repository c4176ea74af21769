"""A run of anybody's step: the step itself, saved, stopped and resumed to the bit, on another mesh too."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from child_flags import CHILD_FLAGS
from fit_program import WIDTH, Mlp, Numbered, batches, by_table, first_state, planned, step
from flax import linen
from flax.training.train_state import TrainState

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.launch.supervisor import free_ports
from meshwright.execution.training.run_directory.run import RunStoppedError, read_metrics
from meshwright.proof.program_plans.fit.config import read_fit_config

STEPS = 6
fit: Any = mw.fit  # also with arguments that its signature forbids


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture(scope="module")
def straight(plan, tmp_path_factory):
    """A run that nothing stops."""
    return fit(step, first_state, batches, plan=plan, out=tmp_path_factory.mktemp("runs") / "straight", steps=STEPS)


def losses(directory):
    return [row["loss"] for row in read_metrics(directory)]


def leaves(state):
    return [
        np.asarray(jax.random.key_data(state.key)),
        *map(np.asarray, jax.tree.leaves((state.params, state.momentum))),
    ]


def stop_after(number, how=signal.SIGTERM):
    """A hook that ends the run after a step."""

    def on_step(row):
        if row["step"] + 1 == number:
            os.kill(os.getpid(), how)

    return on_step


def test_a_run_is_the_step_called_in_a_loop(plan, straight):
    state, found = jax.device_put(first_state(), plan.shardings()[0][0]), []
    laid = plan.apply()
    for number in range(STEPS):
        state, metrics = laid(state, batches(number))
        found.append(metrics["loss"].item())
    np.testing.assert_allclose([row["loss"] for row in straight.rows], found, rtol=1e-6)
    assert all(row["accuracy"] == pytest.approx(1 - row["loss"]) for row in straight.rows)
    for one, other in zip(leaves(straight.state), leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert isinstance(straight.state, Mlp)
    assert straight.state.params["up"].sharding == plan.shardings()[0][0].params["up"]
    assert straight.record.step_seconds == straight.record.step_seconds > 0


@pytest.fixture
def _heard():
    """Ctrl-C is heard as in a terminal: a shell's background processes ignore it, and what is ignored stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("_heard")
def test_a_run_that_a_signal_stops_goes_on_to_the_bit(plan, straight, tmp_path, number):
    run: dict[str, Any] = {"plan": plan, "out": tmp_path, "steps": STEPS, "resume": True}
    with (
        pytest.raises(RunStoppedError, match=rf"stopped by {number.name} after 3 of 6 steps; the last .*/3; `mw.fit"),
        pytest.warns(UserWarning, match="stopping after this step"),
    ):
        fit(step, first_state, batches, **run, on_step=stop_after(3, number))
    finished = fit(step, first_state, batches, **run)
    assert losses(tmp_path) == losses(straight.directory)
    for one, other in zip(leaves(finished.state), leaves(straight.state), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.warns(UserWarning, match="is finished: it has taken 6 steps; steps=12 would continue"):
        again = fit(step, first_state, batches, **run)
    np.testing.assert_array_equal(leaves(again.state)[0], leaves(straight.state)[0])


def test_a_run_goes_on_on_another_mesh(plan, straight, tmp_path):
    fit(step, first_state, batches, plan=plan, out=tmp_path, steps=3)
    finished = fit(step, first_state, batches, plan=by_table(2, 2), out=tmp_path, steps=STEPS, resume=True)
    np.testing.assert_allclose(losses(tmp_path), losses(straight.directory), rtol=1e-5)
    assert finished.state.params["up"].sharding.mesh.size == 4
    config = read_fit_config(tmp_path)
    assert (config.mesh, config.hardware, config.predicted) == ({"data": 2, "model": 2}, "cpu:4", None)
    assert {row["mesh"] for row in finished.rows} == {"fsdp=4,tp=2", "data=2,model=2"}
    page = mw.report([tmp_path, straight.directory])
    assert "accuracy over steps" in page
    assert re.search(r"<td[^>]*>model</td><td[^>]*>2</td><td[^>]*>up:1</td>", page)


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(plan, straight, tmp_path):
    run: dict[str, Any] = {"plan": plan, "out": tmp_path, "resume": True, "save_every": 2}
    fit(step, first_state, batches, **run, steps=4)
    (data,) = (tmp_path / "checkpoints" / "4" / "shapes").glob("metadata")
    data.write_bytes(data.read_bytes() + b" ")
    with (
        pytest.warns(UserWarning, match="4 is damaged: shapes/metadata is not what was written; checkpoint 2 is whole"),
        pytest.warns(UserWarning, match="continues from checkpoint 2: steps 3 to 4 are taken again"),
        pytest.warns(UserWarning, match=r"checkpoint 4 is kept as 4.damaged"),
    ):
        fit(step, first_state, batches, **run, steps=STEPS)
    assert losses(tmp_path) == losses(straight.directory)
    assert (tmp_path / "checkpoints" / "4.damaged").is_dir()


@pytest.mark.parametrize("is_bytes", [False, True])
def test_an_iterator_with_a_position_goes_on_there(plan, straight, tmp_path, is_bytes):
    run: dict[str, Any] = {"plan": plan, "out": tmp_path, "resume": True}
    fit(step, first_state, Numbered(is_bytes), **run, steps=3)
    again = Numbered(is_bytes)
    fit(step, first_state, again, **run, steps=STEPS)
    assert again.read == [3, 4, 5]
    assert losses(tmp_path) == losses(straight.directory)


def test_a_train_state_of_flax_goes_on_with_an_iterator_of_grain(tmp_path):
    model, rows = linen.Dense(WIDTH), [batches(number)["x"] for number in range(8)]

    def make():
        params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def flax_step(state, x):
        loss, gradients = jax.value_and_grad(lambda params: (state.apply_fn({"params": params}, x) ** 2).mean())(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    laid = mw.apply(flax_step, {"batch": "fsdp"}, "fsdp=8", make(), rows[0], store="fsdp")
    shuffled = grain.MapDataset.source(rows).shuffle(seed=1).to_iter_dataset()
    straight = fit(flax_step, make(), shuffled, plan=laid, out=tmp_path / "straight", steps=5)
    fit(flax_step, make(), shuffled, plan=laid, out=tmp_path / "stopped", steps=2)
    finished = fit(flax_step, make(), shuffled, plan=laid, out=tmp_path / "stopped", steps=5, resume=True)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    assert finished.state.step == straight.state.step == 5
    assert isinstance(finished.state, TrainState)


def test_batches_of_an_iterable_that_were_taken_are_skipped(plan, straight, tmp_path):
    every = [batches(number) for number in range(STEPS)]
    state = first_state()
    with pytest.raises(RunStoppedError, match=r"batches ended after 4 of 6 steps; .*checkpoints/4; `mw.fit"):
        fit(step, state, iter(every[:4]), plan=plan, out=tmp_path, steps=STEPS)
    with pytest.raises(MeshwrightError, match="batches has 2, and the run continues after 4 steps"):
        fit(step, state, every[:2], plan=plan, out=tmp_path, steps=STEPS, resume=True)
    fit(step, state, every, plan=plan, out=tmp_path, steps=STEPS, resume=True)
    np.testing.assert_allclose(losses(tmp_path), losses(straight.directory), rtol=1e-5)
    assert not state.params["up"].is_deleted()


def test_a_loss_that_is_nan_stops_the_run(plan, tmp_path):
    def broken(number):
        return batches(number) if number != 3 else {name: np.full_like(one, np.nan) for name, one in batches(3).items()}

    with pytest.raises(RunStoppedError, match=r"the loss is nan at step 4 \(.*checkpoints/2; .* smaller learning rate"):
        fit(step, first_state, broken, plan=plan, out=tmp_path, steps=STEPS, save_every=1)
    assert json.loads((tmp_path / "bad_steps.jsonl").read_text()) == {"step": 3, "why": "the loss is nan"}
    assert (tmp_path / "checkpoints" / "3.nan").is_dir()


def narrow():
    state = first_state()
    return state._replace(params=state.params | {"up": jnp.zeros((WIDTH, WIDTH))})


def short(number):
    return {name: one[:8] for name, one in batches(number).items()}


def returns(change):
    return lambda state, batch: change(*step(state, batch))


def scalar_momentum(state, found):
    return state._replace(momentum=dict.fromkeys(state.params, found["loss"])), found


WRONG = {
    "state, a shape": ({"state": narrow}, r"state is not .*: params.up is float32\[32,32\], .* to be float32\[32,64\]"),
    "state, a leaf": ({"state": lambda: first_state().params}, r"state is not .*: params.down is missing, .* 6 more"),
    "state, no array": ({"state": {"up": "text"}}, "state has a leaf that is not an array"),
    "batch, a shape": ({"batches": short}, r"batch of step 1 is not .*: x is float32\[8,32\], and .* float32\[16,32\]"),
    "batch, a leaf": ({"batches": [{"x": batches(0)["x"]}]}, "batch of step 1 is not .*: y is missing"),
    "batches, none": ({"batches": []}, "batches ended before step 1: there is none"),
    "batches, a number": ({"batches": 3}, "batches is int; it is an iterable of batches, or a function of the step"),
    "step, no metrics": ({"step": returns(lambda state, found: state)}, "the step returns 3 values; it is to return"),
    "step, a leaf": (
        {"step": returns(lambda state, found: (state._replace(momentum=state.key), found))},
        r"does not return the state .*: momentum.down is missing, .* to be float32\[64,32\]; and 2 more",
    ),
    "step, a shape": (
        {"step": returns(scalar_momentum)},
        r"does not return the state .*: momentum.down is float32\[\], and is to be float32\[64,32\]; and 1 more",
    ),
    "step, a vector": (
        {"step": returns(lambda state, found: (state, {"loss": state.params["up"][0]}))},
        r"metric 'loss' is float32\[64\]; metrics are a scalar, or a dict",
    ),
    "step, a name": (
        {"step": returns(lambda state, found: (state, {"step_seconds": found["loss"]}))},
        "metric 'step_seconds' has the name of what every run measures; rename it",
    ),
    "plan, none": ({"plan": "fsdp=8"}, r"plan is str; it is mw.plan\(step"),
    "steps": ({"steps": 0}, "steps is 0; it is a whole number from 1"),
    "save_every": ({"save_every": "often"}, "save_every is often; it is a number of steps, as 500, a time"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(plan, tmp_path, case):
    change, said = WRONG[case]
    given = {"step": step, "state": first_state, "batches": batches, "plan": plan, "steps": STEPS} | change
    with pytest.raises(MeshwrightError, match=said):
        fit(**given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_of_several_arguments_is_a_tuple(straight, tmp_path):
    def parts(state, x, y):
        return step(state, {"x": x, "y": y})

    whole = batches(0)
    laid = mw.apply(parts, {"batch": "fsdp"}, "fsdp=8", jax.eval_shape(first_state), whole["x"], whole["y"])
    done = fit(parts, first_state, lambda number: tuple(batches(number).values()), plan=laid, out=tmp_path, steps=2)
    np.testing.assert_allclose([row["loss"] for row in done.rows], losses(straight.directory)[:2], rtol=1e-5)


def test_a_plan_of_a_step_with_other_arguments_is_refused(tmp_path):
    for kwargs, said in (({}, "one argument"), ({"x": jnp.ones(8)}, "the argument x by name")):
        laid = mw.apply(lambda state, x=1.0: state * x, {}, "fsdp=8", jnp.ones(8), **kwargs)
        with pytest.raises(MeshwrightError, match=f"is of a step with {said}"):
            fit(step, first_state, batches, plan=laid, out=tmp_path, steps=1)


def test_devices_that_are_not_here_are_said(tmp_path):
    with pytest.raises(MeshwrightError, match=r"plan is for v5e:2x4, and JAX has 8 cpu devices .*plan.apply\(\)"):
        fit(step, first_state, batches, plan=planned(on="v5e:2x4"), out=tmp_path, steps=1)


def test_a_directory_with_a_run_is_not_written_over(plan, straight, tmp_path):
    with pytest.raises(MeshwrightError, match="holds a run; resume=True continues with it"):
        fit(step, first_state, batches, plan=plan, out=straight.directory, steps=STEPS)
    (tmp_path / "config.json").write_text('{"workload": {}}')
    with pytest.raises(MeshwrightError, match=r"holds a config.json that is not of a run of fit"):
        fit(step, first_state, batches, plan=plan, out=tmp_path, steps=STEPS, resume=True)
    with pytest.raises(MeshwrightError, match=r"is a run of mw.fit, .* `meshwright report` reads it"):
        mw.train(straight.directory, resume=True)


def test_a_checkpoint_of_another_state_is_refused(straight, tmp_path):
    def other(state, batch):
        return {"x": state["x"] - 0.1 * batch.mean(), "best": state["best"]}, batch.mean()

    state = {"x": jnp.zeros(()), "best": jnp.array(jnp.inf)}  # as in optax.contrib.reduce_on_plateau
    laid = mw.apply(other, {}, "fsdp=8", state, jnp.zeros(8))
    with pytest.raises(MeshwrightError, match=r"from checkpoint 6: its state is another, params.down is gone, and was"):
        fit(other, state, [], plan=laid, out=straight.directory, steps=9, resume=True)
    done = fit(other, state, lambda step: np.ones(8), plan=laid, out=tmp_path, steps=2)
    assert [row["loss"] for row in done.rows] == [1.0, 1.0]
    assert done.state["x"] == pytest.approx(-0.2)


def run_program(out, steps, *processes):
    """A process that begins or continues a run; with 8 simulated devices, or with 4 as one of two processes."""
    flags = f"{CHILD_FLAGS} --xla_force_host_platform_device_count={4 if processes else 8}"
    program = Path(__file__).with_name("fit_program.py")
    words = [str(one) for one in (sys.executable, program, out, steps, *processes)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, text=True, env=os.environ | {"XLA_FLAGS": flags}, **pipe)


def finish(*processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said


def test_a_killed_run_has_the_losses_of_one_that_was_not(tmp_path):
    finish(run_program(tmp_path / "straight", 200))
    process = run_program(tmp_path / "killed", 200)
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "killed" / "checkpoints" / "40").is_dir():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()
    assert 40 <= len(losses(tmp_path / "killed")) < 200
    finish(run_program(tmp_path / "killed", 200))
    assert len(losses(tmp_path / "straight")) == 200
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")


def test_two_processes_are_one_run(tmp_path):
    finish(run_program(tmp_path / "one", 30))
    for steps in (20, 30):  # The second time they continue from the positions of both.
        port = free_ports()
        finish(*(run_program(tmp_path / "two", steps, port, number) for number in range(2)))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)
    assert len(losses(tmp_path / "two")) == 30
