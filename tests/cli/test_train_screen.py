"""The screen of a training run at several widths: the bar, the lines above it, the loss at the end."""

import io
import re

import pytest
from rich.console import Console

from meshwright.cli.train import screen as train_screen
from meshwright.cli.train.screen import LEAST_BAR, TrainScreen, loss_chart, usage
from meshwright.record import Record

PLAN = Record(origin="predicted", mesh={}, hardware="h100:8", step_seconds=0.0575, mfu=0.6)


def row(step):
    return {"step": step, "loss": 5.9 - step / 100, "tokens_per_second": 12e3, "mfu": 0.2954, "step_seconds": 0.1234}


def shown(monkeypatch, *, width, is_terminal, steps=200, taken=100):
    """What a run shows on a terminal of a width or in a pipe, line by line, and what it says at its end."""
    out = io.StringIO()
    made = Console(file=out, force_terminal=is_terminal, width=width, highlight=False)
    monkeypatch.setattr(train_screen, "console", lambda: made)
    with TrainScreen(steps, PLAN, is_quiet=False) as screen:
        screen.note("checkpoint 6 is kept as 6.damaged")
        for step in range(taken):
            screen.step(row(step))
    plain = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", out.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()], screen.summary()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_bar_has_width_and_nothing_is_cut(monkeypatch, width):
    lines, summary = shown(monkeypatch, width=width, is_terminal=True)
    assert max(map(len, lines + summary)) <= width
    assert not [line for line in lines if "…" in line]
    bar = next(line for line in reversed(lines) if "━" in line)
    assert len(re.findall("[━─]", bar)) >= LEAST_BAR
    assert re.search(r"100/200 .* left  loss 4\.910", bar)
    kept = [line for line in lines if re.match(r"step +\d+/200  loss", line)]
    assert [int(line.split("/")[0].split()[-1]) for line in kept] == [1, 20, 40, 60, 80, 100]
    assert "checkpoint 6 is kept as 6.damaged" in lines
    assert summary[0] == "loss 5.900 at step 1, 4.910 at step 100"


def test_a_wide_bar_has_memory_and_the_wait_for_input_too(monkeypatch):
    def more(step):
        return row(step) | {"memory_peak_bytes": 12 * 10**9, "input_seconds": 0.01234}

    plain = row
    monkeypatch.setitem(globals(), "row", lambda step: plain(step) | {"host_peak_bytes": 2 * 10**9})
    bar = next(line for line in reversed(shown(monkeypatch, width=140, is_terminal=True)[0]) if "━" in line)
    assert bar.endswith("(predicted 57.5 ms)  host 2.00 GB")
    assert usage(more(1)) == ["12.0 GB", "input 10.0%"]


def test_what_compiling_took_stands_before_the_first_step(monkeypatch):
    plain = row
    monkeypatch.setitem(globals(), "row", lambda step: plain(step) | ({"compile_seconds": 8.3} if step == 0 else {}))
    lines, _ = shown(monkeypatch, width=100, is_terminal=True)
    assert "compiled in 8.30 s" in lines


def test_a_pipe_has_plain_lines(monkeypatch, capsys):
    lines, _ = shown(monkeypatch, width=100, is_terminal=False)
    assert lines == []
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == [
        "compiling …",
        "step   1/200  loss 5.900  12.0 ktok/s  MFU 29.5%  123 ms  (predicted 57.5 ms)",
    ]
    assert printed.err == "checkpoint 6 is kept as 6.damaged\n"


@pytest.mark.parametrize(("first", "line"), [
    ({"data": {"wiki.jsonl": {"rows": 120_000, "epochs": 0.00456}, "qa": {"rows": 300, "epochs": 2.5}}},
     "data: wiki.jsonl, 120,000 rows, under 0.01 epochs; qa, 300 rows, 2.50 epochs in 200 steps"),
    ({"pairs": 64, "epochs": 0.5}, "data: 64 pairs, 0.50 epochs in 200 steps"),
    ({}, ""),
])  # fmt: skip
def test_the_data_and_its_epochs_stand_before_the_first_step(monkeypatch, first, line):
    plain = row
    monkeypatch.setitem(globals(), "row", lambda step: plain(step) | (first if step == 0 else {}))
    lines, _ = shown(monkeypatch, width=100, is_terminal=True, taken=2)
    assert [one for one in lines if one.startswith("data:")] == ([line] if line else [])


def test_an_output_that_is_gone_does_not_end_the_run(monkeypatch, capsys):
    """`train … | head -1` once ended the run with exit code 0 and no checkpoint."""

    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Gone())
    with TrainScreen(20, PLAN, is_quiet=False) as screen:
        for step in range(20):
            screen.step(row(step))
    assert screen.taken == 20
    said = capsys.readouterr().err
    assert said == "the output cannot be written (Broken pipe): the run continues without its screen\n"


def test_a_chart_has_a_column_for_every_few_steps_and_its_extremes():
    lines = loss_chart([4.0, 3.0, 2.0, 1.0], width=40)
    assert lines[0].split() == ["4.000", "█"]
    assert lines[-1].split() == ["1.000", "███▁"]
    assert max(len(line) for line in loss_chart([float(step) for step in range(1000)], width=40)) == 49
    assert loss_chart([2.0, 2.0], width=40)[-1].split() == ["2.000", "▁▁"]


def test_the_bar_says_how_much_of_the_weights_is_read(monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False)
    monkeypatch.setattr(train_screen, "console", lambda: made)
    screen = TrainScreen(10, PLAN, is_quiet=False)
    assert str(screen.bar(None)).startswith("compiling")
    screen.read(1_000_000_000)
    screen.read(500_000_000)
    assert str(screen.bar(None)) == "reading the weights  1.50 GB"
    monkeypatch.setattr(train_screen, "READING_SECONDS", 0.0)
    assert str(screen.bar(None)).startswith("compiling")
