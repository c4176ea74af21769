"""A run that falls short of its prediction says so once, with the reason that its rows give."""

import pytest

from meshwright.execution.training.watch.shortfall import WARM_UP, WINDOW, Shortfall, shortfall

STEP = {"step_seconds": 1.0, "input_seconds": 0.0}


def said(row, *, planned=1.0, is_simulated=False, steps=WINDOW):
    return shortfall([row] * steps, planned, is_simulated=is_simulated)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            STEP | {"step_seconds": 1.5, "input_seconds": 0.5},
            "1.50 s a step instead of 1.00 s; 500 ms of it: waiting for input",
        ),
        (STEP | {"save_seconds": 0.4}, "1.40 s a step instead of 1.00 s; 400 ms of it: waiting for checkpoints"),
        (STEP | {"compile_seconds": 2.0}, "3.00 s a step instead of 1.00 s; 2.00 s of it: compiling the step again"),
        (
            STEP | {"step_seconds": 1.3, "input_seconds": 0.1},
            "1.30 s a step instead of 1.00 s; 200 ms of it: the devices take longer for a step than predicted",
        ),
    ],
)
def test_the_largest_reason_is_named(row, line):
    assert said(row).endswith(line)
    assert said(row).startswith("the run is ")


def test_a_run_within_15_percent_says_nothing():
    assert said(STEP | {"step_seconds": 1 / 0.851}) is None
    assert said(STEP | {"step_seconds": 1 / 0.849}).startswith("the run is 15.1% short of its prediction")
    assert said(STEP | {"step_seconds": 0.5}) is None
    # An evaluation is asked for.
    assert said(STEP | {"eval_seconds": 9.0}) is None


def test_simulated_devices_are_judged_by_what_they_wait_for():
    assert said(STEP | {"step_seconds": 30.0}, is_simulated=True) is None
    line = said(STEP | {"step_seconds": 2.0, "input_seconds": 1.0}, planned=0.001, is_simulated=True)
    assert line == (
        "the run is 50.0% short of what its steps alone would give: 2.00 s a step instead of 1.00 s; 1.00 s of it:"
        " waiting for input"
    )


def test_it_is_said_once_and_not_of_the_first_steps():
    run = Shortfall(1.0, is_simulated=False)
    slow = STEP | {"step_seconds": 3.0}
    lines = [run.add(slow) for _ in range(3 * (WARM_UP + WINDOW))]
    assert [number for number, line in enumerate(lines) if line] == [WARM_UP + WINDOW - 1]
    # Slow steps while a run warms up do not count; a stall of saving does, of the row before it.
    run = Shortfall(1.0, is_simulated=False)
    assert not any(run.add(slow) for _ in range(WARM_UP))
    for _ in range(WINDOW - 1):
        assert run.add(STEP) is None
    run.add_later({"save_seconds": 10.0})
    assert "waiting for checkpoints" in run.add(STEP)
