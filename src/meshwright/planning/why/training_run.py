"""Time, chip hours and cost of training on a number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.planning.why.fact import Fact
from meshwright.record import Record
from meshwright.units import show_rate


@dataclass(frozen=True)
class TrainingRun(Fact):
    """Time, chip hours and cost of training on `tokens` tokens; cost: None if no price is known."""

    tokens: int
    seconds: float
    chip_hours: float
    cost: float | None

    def __str__(self) -> str:
        cost = "" if self.cost is None else f", which cost {self.cost:,.0f}"
        days = f"{self.seconds / 86400:,.3g} days"
        return f"{show_rate(self.tokens, ' tokens')} take {days}, {self.chip_hours:,.0f} chip hours{cost}"


def training_run(predicted: Record, num_chips: int, tokens: int, price: float | None = None) -> TrainingRun:
    """Return the time, chip hours and cost of training on `tokens` tokens at the predicted speed.

    Restarts and evaluation are not included. price: per chip hour, in any currency.
    """
    seconds = tokens / (predicted.tokens_per_second or math.inf)
    chip_hours = seconds / 3600 * num_chips
    return TrainingRun(tokens, seconds, chip_hours, None if price is None else price * chip_hours)
