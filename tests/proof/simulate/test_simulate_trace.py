import gzip
import json

import pytest
import toy_programs as toys

from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.mesh import MeshShape
from meshwright.proof.simulate.events import COMPUTE
from meshwright.proof.simulate.perfetto import trace, write_trace
from meshwright.proof.simulate.schedule import Schedule, simulate


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    mesh = MeshShape(fsdp=2, tp=4)
    module = parse_hlo(toys.train_step(toys.cpu_mesh(**mesh.degrees), layers=12).compile().as_text())
    return simulate(module, mesh.layout, parse_system("cpu:8"))


def slices(schedule: Schedule, **options) -> list[dict]:
    return [event for event in trace(schedule, **options)["traceEvents"] if event["ph"] == "X"]


def lanes(schedule: Schedule) -> dict[int, str]:
    events = trace(schedule)["traceEvents"]
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_every_event_has_the_fields_that_viewers_need(schedule):
    for event in trace(schedule)["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"]


def test_there_is_a_lane_for_the_ops_and_one_for_the_network_of_each_axis(schedule):
    assert set(lanes(schedule).values()) == {COMPUTE, "network fsdp", "network tp"}
    assert {event["tid"] for event in slices(schedule)} == set(lanes(schedule))


@pytest.mark.parametrize("most_events", [100, 1_000_000])
def test_slices_come_in_order_and_nest_or_follow_each_other_in_every_lane(schedule, most_events):
    open_ends: dict[int, list[float]] = {}
    last = 0.0
    for event in slices(schedule, max_events=most_events):
        assert event["ts"] >= last
        last, end = event["ts"], event["ts"] + event["dur"]
        ends = open_ends.setdefault(event["tid"], [])
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6, event["name"]
        ends.append(end)


def test_loops_are_unrolled_so_that_the_slices_add_up_to_the_step(schedule):
    names = lanes(schedule)
    on_compute = [one for one in slices(schedule) if names[one["tid"]] == COMPUTE and one["cat"] != "loop"]
    assert sum(one["dur"] for one in on_compute) == pytest.approx(schedule.step_seconds * 1e6, rel=1e-3)
    first = next(event for event in schedule.events if event.count == 12)
    assert sum(one["name"] == first.name for one in slices(schedule)) == 12


def test_a_trace_of_fewer_slices_shows_the_first_trips_and_says_how_many_there_are(schedule):
    assert len(slices(schedule, max_events=10_000)) > len(slices(schedule, max_events=500)) <= 500
    shortened = trace(schedule, max_events=500)
    assert 1 <= shortened["otherData"]["trips_shown"] < 12
    assert any(event["name"].endswith(": 12 trips") for event in shortened["traceEvents"])


def test_a_trace_is_written_as_json_and_compressed_where_the_name_says_so(schedule, tmp_path):
    write_trace(schedule, tmp_path / "a.json")
    write_trace(schedule, tmp_path / "a.json.gz")
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == trace(schedule)
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode() == text
