"""A profile of some steps: traces that viewers read, and the collectives that ran, by axes and phase."""

import gzip
import json
import shutil
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.library import train
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.watch.profile import (
    Profile,
    Profiler,
    by_device,
    join_traces,
    parse_profile,
    read_profile,
)
from meshwright.execution.training.watch.trace import DeviceTrace, measured_step
from meshwright.execution.training.watching import WatchConfig
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import dropless_padding_collectives
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.comparison import compare, in_plans_terms
from meshwright.proof.verification.library import plan_and_measured
from meshwright.proof.verification.profiles import axis_bandwidths, compare_profile
from meshwright.record import Collective, Record, record_from_json, wire_bytes

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=2), batch=8, seq_len=32, compute_dtype="f32"
)
CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(fsdp=2, tp=2, sp=2),  # Devices are numbered in another order: fsdp, sp, tp.
    hardware="cpu:8",
    optimizer=Optimizer(warmup_steps=2, decay_steps=6),
    steps=5,
    watching=WatchConfig(profile="3:4"),
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
def test_the_rate_of_an_axis_is_what_a_device_sends_by_the_time_in_its_collectives(run):
    profile = read_profile(run[0])
    plan = make_plan(CONFIG.workload, CONFIG.mesh, CONFIG.system, CONFIG.strategy)
    found = {
        one.axes: one for one in axis_bandwidths(plan.predicted, profile, lay_mesh(CONFIG.system, CONFIG.mesh.layout))
    }
    moves = in_plans_terms(profile.measured).collectives
    assert found.keys() == {move.axes for move in moves}
    sent = sum(wire_bytes(move.kind, move.bytes, 2) for move in moves if move.axes == ("tp",))
    tp = found["tp",]
    assert tp.sent_bytes == sent
    assert tp.measured == pytest.approx(sent / sum(move.seconds for move in moves if move.axes == ("tp",)))
    assert tp.predicted > 0
    assert tp.links_rate is None  # Simulated devices have no links.


def test_the_rate_of_an_axis_stands_beside_that_of_its_links():
    system = parse_system("v5e:2x2")
    mesh = {"fsdp": 4}
    gather = Collective(kind="all-gather", axes=("fsdp",), phase="forward", bytes=4 << 20, seconds=1e-3)
    record = Record(origin="measured", mesh=mesh, hardware="v5e:2x2", collectives=(gather,))
    profile = Profile(steps=(1, 2), compiled=record, measured=record, devices={})
    (found,) = axis_bandwidths(replace(record, collectives=()), profile, lay_mesh(system, mesh))
    assert found.sent_bytes == 3 << 20
    assert found.measured == pytest.approx((3 << 20) / 1e-3)
    assert found.predicted is None
    placement = lay_mesh(system, mesh).placement("fsdp")
    assert found.links_rate == pytest.approx((3 << 20) / collective_seconds("all-gather", 4 << 20, placement).seconds)


MESHES = [
    ("tiny", {"tp": 4, "sp": 2}, 1), ("tiny", {"sp": 4, "fsdp": 2}, 1), ("tiny", {"dp": 2, "sp": 2, "tp": 2}, 1),
    ("tiny", {"dp": 2, "fsdp": 2, "tp": 2}, 1), ("tiny", {"fsdp": 4, "pp": 2}, 2), ("tiny", {"dp": 2, "pp": 4}, 4),
    ("tiny", {"pp": 2, "fsdp": 2, "tp": 2}, 2), ("tiny", {"pp": 2, "sp": 2, "tp": 2}, 2),
    ("tiny-moe", {"ep": 4, "dp": 2}, 1), ("tiny-moe", {"fsdp": 2, "ep": 2, "tp": 2}, 1),
    ("tiny-moe", {"ep": 2, "sp": 2, "fsdp": 2}, 1), ("tiny-moe", {"pp": 2, "ep": 2, "tp": 2}, 2),
    ("tiny-moe", {"dp": 2, "ep": 2, "sp": 2}, 1), ("tiny-moe", {"pp": 2, "dp": 2, "ep": 2}, 2),
]  # fmt: skip
"""Meshes of two and three axes: a model, the mesh and the microbatches of a step."""


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "mesh", "count"), MESHES, ids=[str(MeshShape(**mesh)) for _, mesh, _ in MESHES])
def test_every_axis_is_measured_under_its_own_name(model, mesh, count, tmp_path):
    model = replace(WORKLOAD.model if model == "tiny" else PRESETS[model], num_layers=max(2, mesh.get("pp", 1)))
    config = replace(
        CONFIG,
        workload=replace(WORKLOAD, model=model, batch=16),
        mesh=MeshShape(**mesh),
        strategy=Strategy(num_microbatches=count),
        steps=3,
        watching=WatchConfig(profile="2:3"),
    )
    train(config, tmp_path)
    profile = read_profile(tmp_path)
    plan = make_plan(config.workload, config.mesh, config.system, config.strategy)
    rows = compare_profile(plan.predicted, profile)
    assert all(row.planned and row.compiled and row.measured for row in rows)
    assert all(row.compiled.bytes == row.measured.bytes for row in rows)
    # What goes to experts is planned for balanced routing, and on CPUs sent with room for any.
    padding = dropless_padding_collectives(config.workload, config.mesh, config.strategy, is_ragged=False)
    more = Counter()
    for move in padding:
        more[move.kind, move.axes, move.phase] += move.bytes
    planned = [row.planned.bytes + more[row.kind, row.axes, row.phase] for row in rows]
    assert planned == [row.compiled.bytes for row in rows]


@pytest.mark.slow
def test_a_damaged_profile_is_a_note_and_nothing_else_of_the_run_is_lost(run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(run[0], directory)
    (directory / "profile/collectives.json").write_text('{"steps": [3, 4]')
    notes = []
    assert run_steps(CONFIG, directory, on_note=notes.append).record.step_seconds
    assert "the profile is left out: " in notes[-1]
    assert "collectives.json is not what a profile leaves" in notes[-1]
    _, measured = plan_and_measured(directory, None, {})
    assert (measured.collectives, len(measured.notes)) == ((), 1)
    assert "the profile is left out" in mw.report(directory)


def test_a_profile_that_cannot_be_made_is_a_note(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Only one profile may be run at a time.\nmore")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    notes = []
    with Profiler(tmp_path, CONFIG, SimpleNamespace(compiled=None), 0, notes.append) as profiler:
        profiler.after(2)
        profiler.after(4)
    assert notes == ["the trace could not be begun: Only one profile may be run at a time."]
    assert not (tmp_path / "profile/collectives.json").exists()


@pytest.mark.parametrize(("steps", "start"), [("1:2", 2), ("2:3", 2), ("5:6", 0)])
def test_steps_that_a_run_does_not_take_are_said(steps, start, tmp_path):
    config, notes = replace(CONFIG, watching=WatchConfig(profile=steps)), []
    profiler = Profiler(tmp_path, config, SimpleNamespace(compiled=None), start, notes.append)
    assert notes == [f"steps {steps} are not profiled: this run takes steps {start + 1} to 5"]
    assert not any(profiler.is_due(taken) for taken in range(6))


def test_a_collective_over_no_axes_is_read_back():
    move = Collective(kind="all-gather", axes=(), phase="forward", bytes=8)
    record = Record(origin="measured", mesh={"dp": 4}, hardware="cpu:4", collectives=(move,))
    assert record_from_json(record.to_json()) == record


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
    assert rows[found[0].quantity].measured == 0
    assert not rows[found[0].quantity].is_equal


SUM = """\
HloModule step, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[8] parameter(0)
  double = f32[8] add(x, x)
  ROOT all-reduce.1 = f32[8] all-reduce(double), replica_groups={{0,1,2,3}}, to_apply=add, channel_id=1
}
"""


def traced(seconds, count=2):
    """A device that ran a sum over devices in `seconds`, of ten in which it had work for nine."""
    ran = {"double": 9.0 - seconds, "all-reduce.1": seconds}
    return DeviceTrace(span_seconds=10.0, busy_seconds=9.0, op_seconds=ran, op_counts=dict.fromkeys(ran, count))


def test_the_traces_of_two_processes_are_one_of_all_their_devices():
    first, second = {"2": asdict(traced(1.0)), "3": asdict(traced(2.0))}, {"0": asdict(traced(3.0))}
    # As they travel between processes.
    devices, missing = join_traces(json.loads(json.dumps([first, second, {}])))
    assert (devices["3"], missing) == (traced(2.0), 1)
    found = measured_step(devices, parse_hlo(SUM), {"dp": 4}, steps=2)
    [one] = found.collectives
    assert (one.kind, one.axes, one.bytes, one.count, one.seconds) == ("all-reduce", ("dp",), 32, 1, 1.0)
    assert [*found.devices] == ["0", "2", "3"]
    assert [use.collective_seconds for use in found.devices.values()] == [1.5, 0.5, 1.0]
    assert all((use.step_seconds, use.busy_seconds) == (5.0, 4.5) for use in found.devices.values())


def test_an_event_that_the_profiler_lost_on_one_device_is_not_counted_out():
    devices = {"0": traced(1.0), "1": traced(1.0), "10": traced(0.5, count=1)}
    found = measured_step(devices, parse_hlo(SUM), {"dp": 4}, steps=2)
    assert (found.collectives[0].count, found.collectives[0].seconds) == (1, 0.5)
    assert [*found.devices] == ["0", "1", "10"]


def test_devices_are_named_by_their_number_among_those_of_all_processes(monkeypatch):
    class Device(NamedTuple):
        id: int
        platform: str = "gpu"
        local_hardware_id: int | None = None

    simulated = [Device(number, "cpu") for number in (0, 1, 2048, 2049)]
    chips = [Device(number, local_hardware_id=number % 2) for number in range(4)]
    for devices, traces in (
        (simulated, {2048: traced(1.0), 2049: traced(2.0)}),
        (chips, {0: traced(1.0), 1: traced(2.0)}),
    ):
        monkeypatch.setattr(jax, "devices", lambda found=devices: found)
        monkeypatch.setattr(jax, "local_devices", lambda found=devices: found[2:])
        assert by_device(traces) == {"2": asdict(traced(1.0)), "3": asdict(traced(2.0))}
        with pytest.raises(MeshwrightError, match="it names device 7, and this process has"):
            by_device({**traces, 7: traced(1.0)})


def test_a_profile_that_lacks_something_is_told_by_its_name(tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/collectives.json").write_text('{"steps": [3, 5], "collectives": [{}]}')
    with pytest.raises(MeshwrightError, match="is not what a profile leaves: compiled is missing"):
        read_profile(tmp_path)


@pytest.mark.parametrize("text", ["10", "5:3", "0:2", "a:b", "1:2:3", ""])
def test_steps_that_are_none_are_one_line(text):
    with pytest.raises(MeshwrightError, match=f"profile is '{text}'; it is the first and the last step of a trace"):
        parse_profile(text)
