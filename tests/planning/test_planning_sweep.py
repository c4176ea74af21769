"""A sweep plans each of its values, and says why one cannot be."""

import pytest

from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.planning.search import find_best
from meshwright.planning.sweep import read_sweep, run_sweep

WORKLOAD = Workload(model=load_model("llama3-8b"), batch=256, seq_len=4096)


def best(workload, system):
    return find_best(workload, system)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("chips=64..1024", "chips", (64, 128, 256, 512, 1024)),
        ("chips=48..200", "chips", (48, 96, 192)),
        ("batch=96,192", "batch", (96, 192)),
        ("1,2,4,8", "chips", (1, 2, 4, 8)),
        ("seq-len=2k..8k", "seq_len", (2000, 4000, 8000)),
    ],
)
def test_a_sweep_is_a_key_and_values(text, key, values):
    sweep = read_sweep(text)
    assert (sweep.key, sweep.values) == (key, values)


@pytest.mark.parametrize("text", ["chips", "chips=", "colour=1..4", "chips=8..4", "chips=a..b", "batch=0,1"])
def test_a_sweep_that_means_nothing_is_one_clear_error(text):
    with pytest.raises(MeshwrightError) as raised:
        read_sweep(text)
    assert "\n" not in str(raised.value)


def test_each_point_is_the_plan_of_its_own_value():
    points = run_sweep(read_sweep("chips=16..64"), WORKLOAD, parse_system("v5p:4x4x4"), best)
    assert [point.system for point in points] == ["v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"]
    for point in points:
        assert point.plan == best(WORKLOAD, parse_system(point.system))


def test_a_value_that_cannot_be_has_the_reason_and_the_others_their_plans():
    points = run_sweep(read_sweep("chips=64,65"), WORKLOAD, parse_system("v5p:4x4x4"), best)
    assert points[0].record is not None
    assert points[1].record is None
    assert "v5p:65 is not a slice" in points[1].reason
