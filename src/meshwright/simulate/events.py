"""What happens in a simulated run: one event for each run of an op or a move, those of a loop once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.record import KINDS, Phase

COMPUTE = "compute"
"""The lane of ops, and of the loops they stand in."""


@dataclass(frozen=True)
class Repeat:
    """An event comes `count` times, `period_seconds` apart."""

    count: int
    period_seconds: float


@dataclass(frozen=True, kw_only=True)
class Event:
    """One run of an instruction, and how often it comes again.

    kind: `op`, `loop`, or that of a `Move`. lane: `compute`, `network` and its axes, `copies`, `host`, `network DCN`.
    seconds: of one run. exposed_seconds: how long ops stood still for one run. basis: where the time of an op comes
    from (`schedule_ops.Basis`). repeats: of the loops it is in, outermost first; start_seconds is that of the first.
    """

    name: str
    kind: str
    lane: str
    start_seconds: float
    seconds: float
    phase: Phase
    exposed_seconds: float = 0.0
    axes: tuple[str, ...] = ()
    scope: str = ""
    source: str = ""
    num_bytes: int = 0
    basis: str = ""
    note: str = ""
    repeats: tuple[Repeat, ...] = ()

    @property
    def count(self) -> int:
        """How often it happens in a step."""
        return math.prod(repeat.count for repeat in self.repeats)

    @property
    def total_seconds(self) -> float:
        """The time of all its runs in a step."""
        return self.seconds * self.count

    @property
    def is_communication(self) -> bool:
        """Whether it is data on its way to other devices."""
        return self.kind in KINDS
