"""Charts of records: files that are pictures, with what was asked for in them."""

import itertools
from dataclasses import replace

import pytest

from meshwright.cli.main import main
from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.pictures.charts import Bar, DeviceLimits, label_distances, roofline_point, write_charts
from meshwright.planning.search import rank

SYSTEM = parse_system("v5e:4x4")
LIMITS = DeviceLimits(SYSTEM.peak(), SYSTEM.usable_bytes)


@pytest.fixture(scope="module")
def records():
    workload = Workload(model=load_model("gpt2-xl"), batch=64, seq_len=1024)
    return [plan.predicted for plan in rank(workload, SYSTEM, top=3).plans]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_chart_is_a_file_of_its_suffix(records, tmp_path, suffix, start):
    path = tmp_path / f"plan{suffix}"
    write_charts([Bar(str(index), record) for index, record in enumerate(records)], path, LIMITS, title="a plan")
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_a_sweep_names_its_scale_its_points_and_every_part_of_a_step(records, tmp_path, monkeypatch):
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    bars = [Bar(f"point {index}", record, size=2**index) for index, record in enumerate(records)]
    write_charts(bars, tmp_path / "sweep.svg", LIMITS, title="a sweep", scale="chips")
    text = (tmp_path / "sweep.svg").read_text()
    parts = [name for name, seconds in records[0].breakdown_seconds.items() if seconds]
    for word in ("a sweep", "chips", "point 0", "point 2", "usable", *parts):
        assert word in text


def test_a_point_on_the_roofline_is_never_above_what_its_links_and_its_peak_allow(records):
    points = [point for record in records if (point := roofline_point(record))]
    assert points
    for point in points:
        assert point.flops_per_second < SYSTEM.peak()
        assert point.link_bytes_per_second > 0


def test_a_step_that_moves_nothing_is_not_on_the_roofline(records):
    assert roofline_point(replace(records[0], collectives=())) is None


@pytest.mark.parametrize("name", ["plan.gif", "plan", "missing/plan.png"])
def test_a_chart_that_cannot_be_written_is_one_clear_error(records, tmp_path, name):
    with pytest.raises(MeshwrightError) as raised:
        write_charts([Bar("one", records[0])], tmp_path / name, LIMITS, title="a plan")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_the_title_of_a_sweep_claims_nothing_that_differs_between_its_points(tmp_path, monkeypatch, capsys):
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    asked = ["plan", "gpt2-xl", "--on", "v5e:4x4", "--sweep", "batch=32,64"]
    assert main([*asked, "--plot", str(tmp_path / "a.svg")]) == 0
    for text in (capsys.readouterr().out.splitlines()[0], (tmp_path / "a.svg").read_text()):
        assert "gpt2-xl · train · batch × " in text
        assert "remat" not in text


def test_labels_that_would_touch_are_lowered():
    apart = [(0.0, 100.0), (50.0, 100.0)]
    assert label_distances(["a", "b"], apart) == [6.0, 6.0]
    near = [(0.0, 100.0), (10.0, 100.0), (12.0, 90.0)]
    first, second, third = label_distances(["128,000", "64,000", "8"], near)
    tops = [100 - first, 100 - second, 90 - third]
    assert all(abs(one - other) >= 13 for one, other in itertools.combinations(tops, 2))
