"""The line that a run says where it falls short of its plan, with the reason that its own rows give."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from meshwright.training.run_directory.run import Row
from meshwright.units import show_percent, show_seconds

TOLERANCE = 0.15
"""How far a run may fall short of its plan before a line says so."""

WARM_UP, WINDOW = 5, 20
"""The steps of a process that are not judged, and those after them that are: their mean decides."""

_REASONS = {
    "input_seconds": "waiting for input",
    "save_seconds": "waiting for checkpoints",
    "compile_seconds": "compiling the step again",
}
"""What a step may wait for, by the field of a row that has it."""


class Shortfall:
    """Judges a run by the mean of its steps once they are warm; to be called with each row in its order.

    Evaluation is asked for and no shortfall. Of simulated devices the plan's rate is that of another machine, whose
    cores they do not share with anybody: they are judged by what steps waited for alone.

    Args:
        planned_seconds: of a step. is_simulated: whether devices are simulated ones.
    """

    def __init__(self, planned_seconds: float, *, is_simulated: bool) -> None:
        self._planned = planned_seconds
        self._is_simulated = is_simulated
        self._rows: list[Row] = []
        self._taken = 0
        self._is_said = False

    def add(self, row: Row) -> str | None:
        """Take the row of a step; the line, once, where the steps so far fall short."""
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
        """What was measured after the last row was taken."""
        if self._rows:
            self._rows[-1] = self._rows[-1] | fields


def shortfall(rows: Sequence[Row], planned: float, *, is_simulated: bool) -> str | None:
    """What steps fall short of their plan by, and most of why; None where they do not."""
    waits = {reason: sum(row.get(name, 0.0) for row in rows) / len(rows) for name, reason in _REASONS.items()}
    own = statistics.fmean(row["step_seconds"] - row.get("input_seconds", 0.0) for row in rows)
    taken = own + sum(waits.values())
    if is_simulated:
        planned = own
    if planned >= (1 - TOLERANCE) * taken:
        return None
    parts = waits | {"the devices take longer for a step than planned": own - planned}
    reason, seconds = max(parts.items(), key=lambda item: item[1])
    against = "what its steps alone would give" if is_simulated else "its plan"
    return (
        f"the run is {show_percent(1 - planned / taken)} short of {against}: {show_seconds(taken)} a step instead of"
        f" {show_seconds(planned)}; {show_seconds(seconds)} of it: {reason}"
    )
