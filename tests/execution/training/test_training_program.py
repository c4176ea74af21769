"""The step as one compiled program: what is said where its inputs change, and steps that run ahead of their rows."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.stepping import take_steps


def double(state, batch):
    return {"x": state["x"] + batch["tokens"].sum()}, {"loss": state["x"]}


def program():
    notes = []
    return StepProgram(jax.jit(double, donate_argnums=0), notes.append), notes


def test_a_step_compiles_once_and_a_changed_batch_is_named():
    step, notes = program()
    state = {"x": jnp.float32(1)}
    for _ in range(3):
        state, _ = step(state, {"tokens": jnp.ones((4, 8))})
    assert (step.compilations, notes) == (1, [])
    assert step.compile_seconds == 0.0
    state, _ = step(state, {"tokens": jnp.ones((2, 8))})
    assert step.compilations == 2
    assert step.compile_seconds > 0
    assert float(state["x"]) == 1 + 3 * 32 + 16
    [line] = notes
    assert line.startswith("the step was compiled again, in ")
    assert line.endswith(": batch.tokens is float32[2,8], and was float32[4,8]")


def test_another_sharding_and_an_array_more_are_named():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    step, notes = program()
    state = {"x": jax.device_put(jnp.float32(1), NamedSharding(mesh, P()))}
    whole, split = (jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec)) for spec in (P(), P("x")))
    state, _ = step(state, {"tokens": whole})
    state, _ = step(state, {"tokens": split, "weights": whole})
    assert "batch.tokens is float32[4,8] laid ('x',), and was float32[4,8]" in notes[0]
    assert "batch.weights is float32[4,8], and was not there" in notes[0]


def test_an_error_that_is_no_change_of_inputs_is_raised():
    step, notes = program()
    step({"x": jnp.float32(1)}, {"tokens": jnp.ones((4, 8))})
    step.compiled = lambda *_: (_ for _ in ()).throw(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        step({"x": jnp.float32(1)}, {"tokens": jnp.ones((4, 8))})
    assert notes == []


class Batches:
    """A batch of ones a step, and which steps were asked for."""

    def __init__(self):
        self.asked = []

    def __getitem__(self, step):
        self.asked.append(step)
        return {"tokens": jnp.full((4, 8), step, jnp.float32)}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_rows_are_those_of_their_steps_and_states_of_due_steps(runs_ahead):
    step, _ = program()
    batches = Batches()
    found = list(
        take_steps(
            step, batches, {"x": jnp.float32(0)}, range(2, 8), needs_state=lambda step: step == 4, runs_ahead=runs_ahead
        )
    )
    # Before step n the state is the sum of 32 times each batch before it.
    assert [(row["step"], row["loss"]) for row, _ in found] == [(n, 32.0 * sum(range(2, n))) for n in range(2, 8)]
    has_state = [row["step"] for row, state in found if state is not None]
    assert has_state == ([4, 7] if runs_ahead else [2, 3, 4, 5, 6, 7])
    assert float(found[-1][1]["x"]) == 32.0 * sum(range(2, 8))
    assert batches.asked == [2, 3, 4, 5, 6, 7]
    assert [bool(row.get("compile_seconds")) for row, _ in found] == [True] + 5 * [False]
    assert all(0 <= row["input_seconds"] <= row["step_seconds"] for row, _ in found)


def test_a_batch_that_devices_wait_for_is_measured():
    """Steps of no time, and batches of 20 ms: nearly all of it is waiting."""
    import time

    class Slow(Batches):
        def __getitem__(self, step):
            time.sleep(0.02)
            return super().__getitem__(step)

    step, _ = program()
    rows = [
        row
        for row, _ in take_steps(
            step, Slow(), {"x": jnp.float32(0)}, range(5), needs_state=lambda step: False, runs_ahead=False
        )
    ]
    assert all(row["input_seconds"] >= 0.02 for row in rows[:-1])
    assert rows[-1]["input_seconds"] == 0.0
