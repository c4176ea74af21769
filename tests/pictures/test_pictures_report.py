"""The page of runs: made of hand-written run directories, so that every figure is known."""

import json
import re
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.pictures.curves import MOST_POINTS, curves, thinned, ticks
from meshwright.pictures.report import report
from meshwright.record import Record
from meshwright.units import show_percent

WORKLOAD = Workload(
    model=replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=1), batch=8, seq_len=32, compute_dtype="f32"
)
CONFIG = RunConfig(
    workload=WORKLOAD, mesh=MeshShape(fsdp=2, tp=2), hardware="cpu:4", optimizer=Optimizer(decay_steps=9), steps=9
)


def make_run(directory, *, steps=6, **more):
    """A run directory with rows of half a second, 10 % of it waiting for input."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG.to_json()))
    lines = []
    for step in range(steps):
        row = {
            "step": step, "mesh": str(CONFIG.mesh), "hardware": "cpu:4", "began_at": 0, "loss": 5.0 - step,
            "grad_norm": 1.5, "learning_rate": 0.001, "step_seconds": 0.5, "input_seconds": 0.05,
            "tokens_per_second": 512.0, "mfu": 0.25, "memory_peak_bytes": None, "time": 110.0 + step,
            "sources": {"wiki.jsonl": {"tokens": 200, "documents": 3}, "<code>": {"tokens": 56}},
        }  # fmt: skip
        row |= {"startup_seconds": 2.0, "compile_seconds": 7.0} if step == 0 else {}
        lines += [row | more, *([{"step": step, "save_seconds": 0.25, "eval_loss": 4.5}] if step == 2 else [])]
        share = {"acc": 0.125 * step, "acc_stderr": 0.05, "acc_norm": 0.25, "acc_norm_stderr": None}
        lines += [{"step": step, "eval_tasks": {"<sums>": {"questions": 40} | share}}] if step in (2, 4) else []
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def cells(page, row):
    """The cells of the table row that begins with a text."""
    found = re.search(rf"<tr[^>]*><td[^>]*>{re.escape(row)}</td>(.*?)</tr>", page)
    return re.findall(r"<td[^>]*>(.*?)</td>", found[1])


def test_the_page_has_each_figure_of_a_run(tmp_path):
    directory = make_run(tmp_path / "first")
    compiled = Record(origin="compiled", mesh={}, hardware="cpu:4", memory_bytes={"peak": 3 * 10**6})
    (directory / "compiled.json").write_text(json.dumps(compiled.to_json()))
    (directory / "bad_steps.jsonl").write_text('{"step": 4, "why": "the loss is nan"}\n')
    (directory / "restarts.jsonl").write_text(
        '{"time": 1, "start": 3, "lost_steps": 12, "lost_seconds": 6.0, "down_seconds": 8.0}\n'
    )
    page = report(directory)
    assert cells(page, "first")[:4] == ["6 of 9", "0.0000", "4.5000", "512 tok/s"]
    assert cells(page, "memory peak")[1:] == ["3.00 MB", "–"]
    # 6 steps of 0.45 s, of 2.7 + 0.3 + 7 + 0.25 + 2 + 6 + 8 s, and half a second between steps but for the save.
    seconds = 2.7 + 0.3 + 7 + 0.25 + 2 + 6 + 8 + 5 * 0.5 - 0.25
    assert cells(page, "steps")[0] == f"2.70 s  {show_percent(2.7 / seconds)}"
    assert cells(page, "down")[0] == f"8.00 s  {show_percent(8 / seconds)}"
    assert "12 steps were taken again" in page
    assert cells(page, "wiki.jsonl") == ["1,200", "78.1%", "18"]
    assert cells(page, "&lt;code&gt;")[:2] == ["336", "21.9%"]
    assert cells(page, "&lt;sums&gt;") == ["40", "50.0% ± 5.00%", "25.0%", "5"]
    assert "Accuracy of &lt;sums&gt;" in page
    assert "the loss is nan" in page
    assert "<code>" not in page.split("<style>")[0]
    # Loss, rate, norm, tokens a second, MFU, input and the task; the held-out loss is a point.
    assert (page.count("<polyline"), page.count("<circle")) == (7, 1)


def test_curves_of_runs_stand_in_the_same_charts(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("first", "second", "third")]
    page = report(runs)
    charts = re.findall(r"<figure.*?</figure>", page)
    assert len(charts) >= 6
    loss = next(chart for chart in charts if "Loss, nats" in chart)
    assert len(set(re.findall(r'stroke="(#\w+)" stroke-width="1.8"', loss))) == 3
    assert [cells(page, name)[0] for name in ("first", "second", "third")] == 3 * ["6 of 9"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    page = report([make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")])
    assert cells(page, str(tmp_path / "a" / "run"))[0] == "6 of 9"


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    page = report(make_run(tmp_path / "first"))
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "default-src 'none'" in page


def test_a_report_is_no_pdf(tmp_path):
    with pytest.raises(MeshwrightError, match=r"a report is an HTML page, as report\.html, and not a \.pdf file"):
        mw.report(tmp_path, tmp_path / "x.pdf")


def test_a_directory_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(MeshwrightError, match=r"no run in .*: it has no config\.json"):
        mw.report(tmp_path)
    run = make_run(tmp_path / "run", steps=0)
    with pytest.raises(MeshwrightError, match=r"has no step in its metrics\.jsonl yet"):
        mw.report(run)
    with pytest.raises(MeshwrightError, match="there is no run to report"):
        mw.report([])
    with pytest.raises(MeshwrightError, match="missing"):
        mw.report(make_run(tmp_path / "other"), tmp_path / "missing" / "report.html")


def test_long_curves_are_thinned_by_means():
    points = [(float(step), float(step % 2)) for step in range(1, 10 * MOST_POINTS + 1)]
    found = thinned(points)
    assert len(found) == MOST_POINTS
    assert {value for _, value in found} == {0.5}
    assert found[-1][0] == 10 * MOST_POINTS
    assert thinned(points[:7]) == points[:7]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1.9, 5.9, [1, 2, 3, 4, 5, 6]), (3, 3, [3]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_reach_around_all(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_a_chart_without_points_is_none_and_one_point_is_a_dot():
    assert curves({"a": ("#000000", [])}, str, title="t") == ""
    drawn = curves({"a<b": ("#000000", [(3.0, 1.0)])}, lambda value: f"{value:g}", title="t")
    assert "<circle" in drawn
    assert "a&lt;b" in drawn
