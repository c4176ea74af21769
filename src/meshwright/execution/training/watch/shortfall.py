"""Compare the step time of a run with its plan, and name the main reason if the run is slower."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from meshwright.execution.training.run_directory.run import Row
from meshwright.units import show_percent, show_seconds

TOLERANCE = 0.15
"""Shortfall, as a fraction of the measured step time, above which a note is printed."""

WARM_UP, WINDOW = 5, 20
"""Number of steps at the start of a process that are ignored, and number of steps that each comparison averages."""

_REASONS = {
    "input_seconds": "waiting for input",
    "save_seconds": "waiting for checkpoints",
    "compile_seconds": "compiling the step again",
}
"""{field of a row that measures seconds of waiting: its reason, for the note}."""


class Shortfall:
    """Compares the mean step time after warm-up with the plan. `add` is called with the row of each step, in order.

    Evaluation time does not count. For simulated devices only waiting time counts, because the plan assumes devices
    that do not share cores.

    Args:
        planned_seconds: planned seconds per step.
        is_simulated: whether devices are simulated.
    """

    def __init__(self, planned_seconds: float, *, is_simulated: bool) -> None:
        self._planned = planned_seconds
        self._is_simulated = is_simulated
        self._rows: list[Row] = []
        self._taken = 0
        self._is_said = False

    def add(self, row: Row) -> str | None:
        """Add the row of a step. Return a line, at most once in a run, if recent steps are slower than predicted."""
        self._taken += 1
        if self._is_said or self._taken <= WARM_UP:
            return None
        self._rows.append(row)
        if len(self._rows) < WINDOW:
            return None
        line = shortfall(self._rows, self._planned, is_simulated=self._is_simulated)
        self._rows.clear()
        self._is_said = line is not None
        return line

    def add_later(self, fields: Row) -> None:
        """Add measurements of the last row's step that arrived after the row."""
        if self._rows:
            self._rows[-1] = self._rows[-1] | fields


def shortfall(rows: Sequence[Row], planned: float, *, is_simulated: bool) -> str | None:
    """Return a line on how much slower steps are than predicted, with the main reason; None if they are not slower.

    Args:
        planned: predicted seconds per step.
        is_simulated: whether devices are simulated.
    """
    waits = {reason: sum(row.get(name, 0.0) for row in rows) / len(rows) for name, reason in _REASONS.items()}
    own = statistics.fmean(row["step_seconds"] - row.get("input_seconds", 0.0) for row in rows)
    taken = own + sum(waits.values())
    if is_simulated:
        planned = own
    if planned >= (1 - TOLERANCE) * taken:
        return None
    parts = waits | {"the devices take longer for a step than predicted": own - planned}
    reason, seconds = max(parts.items(), key=lambda item: item[1])
    against = "what its steps alone would give" if is_simulated else "its prediction"
    return (
        f"the run is {show_percent(1 - planned / taken)} short of {against}: {show_seconds(taken)} a step instead of"
        f" {show_seconds(planned)}; {show_seconds(seconds)} of it: {reason}"
    )
