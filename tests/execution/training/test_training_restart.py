"""One command begins a run and continues with it: what it must agree with, and what a finished run says."""

import signal
from dataclasses import replace

import jax
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.interrupt import Interruption, interruptions
from meshwright.execution.training.library import run_to_resume
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.restart import stopped_run_errors
from meshwright.execution.training.run_directory.resume import resumed_run
from meshwright.execution.training.run_directory.run import RunConfig, RunStoppedError, begin_run
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.planning.plan import make_plan, write_plan

CONFIG = RunConfig(
    workload=Workload(model=PRESETS["tiny"], batch=8, seq_len=16, compute_dtype="f32"),
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    memory_headroom=0.1,
    optimizer=Optimizer(warmup_steps=2, decay_steps=40),
    steps=2,
)
SAME = {"batch": 8, "seq_len": 16, "dtype": "f32"}


@pytest.fixture
def begun(tmp_path):
    """A run directory with a config alone."""
    begin_run(tmp_path, CONFIG, 0)
    return tmp_path


def resumed(directory, what, **options):
    return resumed_run(directory, steps=None, change=False, options=options, what=what)


def test_one_command_begins_a_run_and_goes_on_with_it(begun):
    assert run_to_resume("tiny", begun / "new") is None
    assert run_to_resume("tiny", begun) == begun
    assert run_to_resume(begun, None) == begun
    with pytest.raises(MeshwrightError, match="stays in its directory"):
        run_to_resume(begun, begun / "new")
    assert resumed(begun, "tiny", **SAME, remat="auto", mesh="fsdp=8") == (CONFIG, [])
    assert resumed(begun, CONFIG.workload) == (CONFIG, [])


def test_a_plan_begins_a_run_and_goes_on_with_it(begun):
    plan = make_plan(CONFIG.workload, CONFIG.mesh, CONFIG.system, CONFIG.strategy)
    write_plan(plan, begun / "plan.yaml")
    assert resumed(begun, begun / "plan.yaml") == (CONFIG, [])
    other = make_plan(replace(CONFIG.workload, batch=16), CONFIG.mesh, CONFIG.system, CONFIG.strategy)
    with pytest.raises(MeshwrightError, match=r"^batch is 16; .* was begun with 8: --change"):
        resumed(begun, other)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("tiny", {"batch": 16}, "batch is 16; .* was begun with 8"),
        ("tiny", {"num_layers": 1}, "another model than tiny: num_layers is 2 there, 1 here; -o starts another"),
        ("tiny-qwen3", {}, "another model than tiny-qwen3: name is 'tiny' there, 'tiny-qwen3' here; "),
    ],
)
def test_a_command_that_does_not_agree_with_the_run_is_refused(begun, what, options, message):
    with pytest.raises(MeshwrightError, match=message):
        resumed(begun, what, **options)


def test_weights_are_those_that_the_run_began_with(begun, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(MeshwrightError, match=r"weights is .*hf; .* was begun with none, and only a new run"):
        resumed(begun, "tiny", weights=tmp_path / "hf")
    begin_run(begun, replace(CONFIG, weights=str(tmp_path / "hf")), 0)
    assert resumed(begun, "tiny", weights=tmp_path / "hf")[1] == []


def test_a_finished_run_takes_no_step_and_says_so(tmp_path):
    config = replace(CONFIG, workload=replace(CONFIG.workload, model=replace(CONFIG.workload.model, num_layers=1)))
    first = run_steps(config, tmp_path / "run")
    assert first.taken == 2
    before, notes = sorted((tmp_path / "run").rglob("*")), []
    again = run_steps(config, tmp_path / "run", on_step=pytest.fail, on_note=notes.append)
    assert again == first
    assert notes == [f"{tmp_path / 'run'} is finished: it has taken 2 steps; --steps 4 would continue"]
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_a_grace_period_that_is_over_ends_the_process_and_one_that_is_kept_does_not(monkeypatch):
    left, notes = [], []

    class Timer:
        """A grace period whose end the test decides."""

        def __init__(self, seconds, end):
            assert seconds == 7.0
            self.end, self.ident, self.cancelled = end, None, False
            timers.append(self)

        def start(self):
            self.ident = 1

        def cancel(self):
            self.cancelled = True

    timers = []
    monkeypatch.setattr("meshwright.execution.training.interrupt.threading.Timer", Timer)
    with interruptions(notes.append, lambda *how: left.append(how), grace_seconds=7.0) as state:
        state.has_begun = True
        signal.raise_signal(signal.SIGTERM)
        assert state.signal == signal.SIGTERM
        assert timers[0].ident
        timers[0].end()
    assert left == [(signal.SIGTERM, True)]
    assert timers[0].cancelled
    with interruptions(notes.append, lambda *how: left.append(how), grace_seconds=7.0) as state:
        state.has_begun = True
        signal.raise_signal(signal.SIGINT)
        assert not timers[1].ident
    assert len(left) == 1


def test_a_program_keeps_the_handlers_that_it_has():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with interruptions(pytest.fail, None, grace_seconds=7.0) as state:
            signal.raise_signal(signal.SIGTERM)
        assert (received, state.signal) == ([signal.SIGTERM], None)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_terminal_that_closes_stops_a_run_however_often_it_is_said():
    before, notes = signal.signal(signal.SIGHUP, signal.SIG_DFL), []
    try:
        with interruptions(notes.append, None, grace_seconds=7.0) as state:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert state.signal == signal.SIGTERM
        assert len(notes) == 1
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with interruptions(notes.append, None, grace_seconds=7.0) as state:
            signal.raise_signal(signal.SIGHUP)
            assert state.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_processes_that_do_not_meet_are_one_error(tmp_path):
    """XLA:CPU gives up its first collective after 30 s, as when a machine is overloaded."""
    failed = jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: …")
    stopped = pytest.raises(RunStoppedError, match=r"did not reach each other within 30 s.*; the last is 3")
    with stopped, stopped_run_errors(tmp_path, 0, Interruption(), lambda _: "the last is 3"):
        raise failed
