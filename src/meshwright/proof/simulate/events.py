"""Events of a simulated step: executions of ops and transfers; an event in a loop is stored once with its repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.record import KINDS, Phase

COMPUTE = "compute"
"""The lane that shows ops and the loops around them."""


@dataclass(frozen=True)
class Repeat:
    """The repetition of an event in one loop: it occurs `count` times, at intervals of `period_seconds`."""

    count: int
    period_seconds: float


@dataclass(frozen=True, kw_only=True)
class Event:
    """One execution of an instruction, and its repeats.

    kind: `op`, `loop`, or the kind of a `Transfer`. lane: the row of the timeline, one of `compute`, `network` with its
    axes, `copies`, `host`, `beside` (asynchronous calls), `network DCN`. start_seconds: start of the first execution.
    seconds: duration of one execution. exposed_seconds: how long ops stalled for one execution. num_bytes: what a
    transfer moves in one execution. basis: source of an op's time (`op_seconds.Basis`). note: a loop's trip count, or
    what could not be determined about a transfer. repeats: one for each enclosing loop, outermost first.
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
        """How often the event occurs in a step."""
        return math.prod(repeat.count for repeat in self.repeats)

    @property
    def total_seconds(self) -> float:
        """The sum of the durations of all executions of the event in a step."""
        return self.seconds * self.count

    @property
    def is_communication(self) -> bool:
        """Whether the event sends data to other devices."""
        return self.kind in KINDS
