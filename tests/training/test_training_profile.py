"""A profile of some steps: traces that viewers read, and the collectives that ran, by axes and phase."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.errors import MeshwrightError
from meshwright.families import PRESETS
from meshwright.mesh import MeshShape
from meshwright.planner import make_plan
from meshwright.step import Workload
from meshwright.training import Optimizer, RunConfig, train
from meshwright.training.watch import parse_profile, read_profile
from meshwright.training.watching import Watching
from meshwright.verification import compare_profile, plan_and_measured
from meshwright.verification.comparison import compare, in_plans_terms

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=2), batch=8, seq_len=32, compute_dtype="f32"
)
CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(dp=2, fsdp=2, tp=2),
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=6),
    steps=5,
    watching=Watching(profile="3:4"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose third and fourth steps were traced, and its record."""
    directory = tmp_path_factory.mktemp("run")
    return directory, train(CONFIG, directory)


@pytest.mark.slow
def test_measured_collectives_are_the_compiled_ones_in_bytes_and_counts(run):
    directory, _ = run
    profile = read_profile(directory)
    assert profile.steps == (3, 4)
    assert profile.measured.notes == ()
    compiled, measured = profile.compiled.collectives, profile.measured.collectives
    assert Counter((c.kind, c.axes, c.phase, c.bytes, c.count) for c in measured) == Counter(
        (c.kind, c.axes, c.phase, c.bytes, c.count) for c in compiled
    )
    assert all(c.seconds > 0 for c in measured)
    plan = make_plan(CONFIG.workload, CONFIG.mesh, CONFIG.system, CONFIG.strategy)
    rows = compare_profile(plan.predicted, profile)
    assert {row.phase for row in rows} == {"forward", "recompute", "backward", "update"}
    assert all(row.planned.bytes == row.compiled.bytes == row.measured.bytes for row in rows)


@pytest.mark.slow
def test_every_device_was_busy_for_most_of_a_step(run):
    directory, record = run
    devices = read_profile(directory).devices
    assert sorted(devices) == list("01234567")
    for use in devices.values():
        assert use["collective_seconds"] > 0
        assert 0.2 * use["step_seconds"] < use["busy_seconds"] <= use["step_seconds"]
        # The step as the host measures it is that of the trace, roughly: machines are shared.
        assert 0.2 < use["step_seconds"] / record.step_seconds < 5


@pytest.mark.slow
def test_the_traces_are_those_that_perfetto_and_xprof_read(run):
    directory, _ = run
    [trace] = (directory / "profile/plugins/profile").glob("*/*.trace.json.gz")
    [_] = (directory / "profile/plugins/profile").glob("*/*.xplane.pb")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert steps == {"3", "4"}


@pytest.mark.slow
def test_verify_has_the_measured_column_of_a_run_with_a_profile(run):
    directory, record = run
    plan, measured = plan_and_measured(directory, None, {})
    assert measured.collectives == record.collectives
    compiled = in_plans_terms(read_profile(directory).compiled)
    compiled = replace(compiled, memory_bytes={"arguments": 1, "temporaries": 1, "peak": 2})
    rows = compare(plan.predicted, compiled, argument_bytes=1, measured=measured)
    found = [row for row in rows if row.unit == "B" and not row.quantity.startswith("memory")]
    assert found
    assert all(row.predicted == row.compiled == row.measured for row in found)
    # What only a run has is a row too, and what it lacks is none of it.
    other = replace(measured, collectives=(replace(measured.collectives[0], phase="update"),))
    rows = compare(plan.predicted, compiled, argument_bytes=1, measured=other)
    rows = {row.quantity: row for row in rows}
    assert rows["all-gather fsdp forward"].measured == 0
    assert not rows["all-gather fsdp forward"].is_equal


@pytest.mark.parametrize("text", ["10", "5:3", "0:2", "a:b", "1:2:3", ""])
def test_steps_that_are_none_are_one_line(text):
    with pytest.raises(MeshwrightError, match=f"profile is '{text}'; it is the first and the last step of a trace"):
        parse_profile(text)
