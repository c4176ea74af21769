"""The screen of a training run: a bar, lines about some steps above it, and at the end a chart of the loss."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from meshwright.cli.eval import accuracies
from meshwright.pictures.tables import console
from meshwright.pictures.text import WIDTH, wrap
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

LINES = 10
"""The number of lines about steps that a run prints above its bar, or in a pipe."""

QUIET_SECONDS = 25.0
"""The longest time without a line in a pipe."""

READING_SECONDS = 1.0
"""After the last bytes of weights arrived, the bar shows `reading the weights` for so many seconds more."""

LEAST_BAR, MOST_BAR = 10, 40
CHART_WIDTH, CHART_HEIGHT = 48, 4
_EIGHTHS = " ▁▂▃▄▅▆▇█"


class TrainScreen:
    """A run's screen while it trains: a context manager whose `step` and `note` are callbacks of `run_steps`.

    On a terminal it is a bar, in a pipe an occasional line; both print a lasting line for each tenth of the run.
    """

    def __init__(self, steps: int, planned: Record, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self.taken = 0
        self._steps = steps
        self._planned = planned
        self._out = console()
        self._losses: list[float] = []
        self._read, self._read_at = 0, -math.inf
        self._first: int | None = None
        self._began = self._said = time.monotonic()
        self._ended = threading.Event()
        self._has_bar = not is_quiet and self._out.is_terminal
        self._bar = Progress(_Line(self), console=self._out, disable=not self._has_bar)
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> TrainScreen:
        self._bar.start()
        if not self.is_quiet and not self._has_bar:
            self._line("compiling …")
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the bar, and restore the terminal's cursor."""
        self._ended.set()
        with suppress(OSError):
            self._bar.stop()

    def _tick(self) -> None:
        """In a pipe, print a line if none was printed for `QUIET_SECONDS`."""
        while not self._ended.wait(1.0):
            if time.monotonic() - self._said > QUIET_SECONDS:
                where = f"step {self.taken}/{self._steps}" if self.taken else "compiling"
                self._line(f"{where} … {time.monotonic() - self._began:.0f} s")

    def note(self, line: str) -> None:
        """Print a line above the bar, on stderr."""
        with suppress(OSError):  # Nobody reads any more.
            if self._has_bar:
                self._bar.console.print(Text(line))
            else:
                print(line, file=sys.stderr, flush=True)

    def _line(self, line: str) -> None:
        self._said = time.monotonic()
        try:
            if self._has_bar:
                self._bar.console.print(Text(line))
            else:
                print(line, flush=True)
        except OSError as error:  # The reader of the pipe is gone, or its disk is full: no reason to lose the run.
            self.is_quiet = True
            self.note(f"the output cannot be written ({error.strerror}): the run continues without its screen")

    def read(self, size: int) -> None:
        """Record that `size` more bytes of the weights were read."""
        self._read, self._read_at = self._read + size, time.monotonic()

    def step(self, row: dict[str, Any]) -> None:
        """Show the metrics of a step. row: as in metrics.jsonl."""
        self.taken = row["step"] + 1
        if not row.get("skipped"):  # Else the loss may be no number, and nothing was learned from it.
            self._losses.append(row["loss"])
        self._first = row["step"] if self._first is None else self._first
        self._row = row
        self._bar.update(self._task, completed=self.taken)
        if self.is_quiet:
            return
        every = max(1, self._steps // LINES)
        is_late = not self._has_bar and time.monotonic() - self._said > QUIET_SECONDS
        if row["step"] == self._first or self.taken % every == 0 or is_late:
            width = self._out.width
            if self._has_bar and row["step"] == self._first and row.get("compile_seconds"):
                self._line(f"compiled in {show_seconds(row['compile_seconds'])}")
            if row["step"] == self._first and (data := data_line(row, self._steps)):
                self._line("\n".join(wrap(data, min(width, WIDTH), then="  ")))
            self._line("  ".join(self._fit([f"step {self.taken:>{len(str(self._steps))}}/{self._steps}"], width)))

    def evaluated(self, row: dict[str, Any]) -> None:
        """Print the metrics of an evaluation after a step. row: as in metrics.jsonl."""
        if self.is_quiet:
            return
        after, lines = f"after step {row['step'] + 1}", list[str]()
        if "eval_pairs" in row:
            words = (f"loss {row['eval_loss']:.3f}", *_of_pairs(row, "eval_"), f"{row['eval_pairs']:,} pairs")
            lines.append(f"held out, {after}: {', '.join(words)}")
        elif "eval_loss" in row:
            loss = f"loss {row['eval_loss']:.3f}, perplexity {row['eval_perplexity']:.4g}"
            lines.append(f"held out, {after}: {loss}, {row['eval_tokens']:,} tokens")
        for name, figures in row.get("eval_tasks", {}).items():
            lines.append(f"{name}, {after}: {', '.join(accuracies(figures))}, {figures['questions']:,} questions")
        for line in lines[:-1]:
            self._line(line)
        self._line(f"{lines[-1]}, evaluated in {show_seconds(row['eval_seconds'])}")

    def _fit(self, fixed: list[str], width: int, more: Sequence[str] = ()) -> list[str]:
        """Return the texts of `fixed`, then figures of the last step and the texts of `more`, until `width` is full."""
        row, words = self._row, list(fixed)
        words_of_step = [
            f"loss {row['loss']:.3f}",
            *_of_pairs(row),
            show_rate(row["tokens_per_second"], "tok/s"),
            *(() if self._planned.shown_mfu is None else (f"MFU {show_percent(row['mfu'])}",)),
            show_seconds(row["step_seconds"]),
            f"(predicted {show_seconds(self._planned.step_seconds or 0.0)})",
        ]
        for word in (*words_of_step, *more):
            if len("  ".join([*words, word])) > width:
                break
            words.append(word)
        return words

    def bar(self, task: Task) -> Text:
        """Return the bar's line: step, bar, time left and figures of the last step."""
        if not self._losses and time.monotonic() - self._read_at < READING_SECONDS:
            return Text(f"reading the weights  {show_bytes(self._read)}")
        if not self._losses:
            return Text(f"compiling  {_clock(time.monotonic() - self._began)}")
        where, left = f"{self.taken}/{self._steps}", task.time_remaining
        clock = f"{_clock(left) if left is not None else '-:--'} left"
        words = "  ".join(self._fit([clock], self._out.width - len(where) - LEAST_BAR - 2, usage(self._row)))
        width = min(MOST_BAR, self._out.width - len(where) - len(words) - 2)
        done = int(width * self.taken / self._steps)
        parts = (where, " ", ("━" * done, "bar.complete"), ("─" * (width - done), "bar.back"), " ", words)
        return Text.assemble(*parts, no_wrap=True)

    @property
    def ends(self) -> dict[str, float]:
        """The first and the last loss, under `first` and `last`; {} before the first step."""
        return {"first": self._losses[0], "last": self._losses[-1]} if self._losses else {}

    def summary(self) -> list[str]:
        """Return lines with the first and the last loss, and a chart of all losses."""
        if self._first is None or not self._losses:
            return []
        first, last = self._losses[0], self._losses[-1]
        lines = [f"loss {first:.3f} at step {self._first + 1}, {last:.3f} at step {self.taken}"]
        if len(self._losses) > 2:
            lines += loss_chart(self._losses, width=min(CHART_WIDTH, self._out.width - 10))
        return lines


def data_line(row: Mapping[str, Any], steps: int) -> str:
    """Return a line with each data source's rows, and how many epochs of it a run of `steps` steps reads.

    row: the first row of metrics.jsonl. Returns '' if it names no data.
    """
    if "pairs" in row:
        parts = [f"{row['pairs']:,} pairs, {_epochs(row['epochs'])}"]
    else:
        sizes = row.get("data", {})
        parts = [f"{name}, {size['rows']:,} rows, {_epochs(size['epochs'])}" for name, size in sizes.items()]
    return f"data: {'; '.join(parts)} in {steps:,} steps" if parts else ""


def _epochs(number: float) -> str:
    return f"{number:.2f} epochs" if number >= 0.01 else "under 0.01 epochs"


def usage(row: Mapping[str, Any]) -> list[str]:
    """Return texts on a step: peak memory of a device (of the host if devices report none), time spent awaiting input.

    The latter is a fraction of the step time. row: as in metrics.jsonl.
    """
    words = []
    if (peak := row.get("memory_peak_bytes")) is not None:
        words.append(show_bytes(peak))
    elif (host := row.get("host_peak_bytes")) is not None:
        words.append(f"host {show_bytes(host)}")
    if "input_seconds" in row:
        words.append(f"input {show_percent(row['input_seconds'] / row['step_seconds'])}")
    return words


class _Line(ProgressColumn):
    """The bar's line, fitted to the screen's width."""

    def __init__(self, screen: TrainScreen) -> None:
        super().__init__()
        self._screen = screen

    def render(self, task: Task) -> Text:
        return self._screen.bar(task)


def _of_pairs(row: dict[str, Any], prefix: str = "") -> list[str]:
    """Return texts on the reward margin and accuracy of preference pairs; [] if the row has none.

    prefix: the beginning of the metrics' names, such as `eval_`.
    """
    if f"{prefix}reward_margin" not in row:
        return []
    margin, accuracy = row[f"{prefix}reward_margin"], row[f"{prefix}reward_accuracy"]
    # A margin that rounds to zero has no sign.
    return [f"margin {round(margin, 3) + 0.0:.3f}", f"accuracy {show_percent(accuracy)}"]


def loss_chart(losses: list[float], *, width: int) -> list[str]:
    """Return a bar chart of losses as lines; a column is the mean of some steps, the labels are the extremes."""
    columns = min(width, len(losses))
    edges = [round(index * len(losses) / columns) for index in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    heights = [1 + round((CHART_HEIGHT * 8 - 1) * (mean - low) / ((high - low) or 1.0)) for mean in means]
    lines = []
    for row in reversed(range(CHART_HEIGHT)):
        cells = [min(8, max(0, height - 8 * row)) for height in heights]
        drawn = "".join(_EIGHTHS[cell] for cell in cells)
        label = f"{high:.3f}" if row == CHART_HEIGHT - 1 else f"{low:.3f}" if row == 0 else ""
        lines.append(f"{label:>8} {drawn.rstrip()}")
    return lines


def _clock(seconds: float) -> str:
    """Format a time as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
