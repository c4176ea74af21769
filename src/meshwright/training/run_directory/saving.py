"""What a run says of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When checkpoints are written, and which are kept.

    every, minutes: steps and minutes between them; 0 is never, but for the last. keep: how many of the last are kept;
    keep_every: of every so many steps the first is kept too, 0 none. grace_seconds: how long a run may take to end
    after a SIGTERM, its checkpoint included.
    """

    every: int = 0
    minutes: float = 0.0
    keep: int = 2
    keep_every: int = 0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 0:
            raise MeshwrightError(
                f"save_every is {self.every}; it is a whole number of steps, or 0 to keep the last only"
            )
        if self.minutes < 0:
            raise MeshwrightError(f"save_minutes is {self.minutes:g}; it is a number of minutes, or 0 for none")
        if self.keep < 1:
            raise MeshwrightError(f"keep is {self.keep}; it is a whole number of checkpoints from 1")
        if self.keep_every < 0:
            raise MeshwrightError(f"keep_every is {self.keep_every}; it is a whole number of steps, or 0 for none")
        if self.grace_seconds <= 0:
            raise MeshwrightError(f"grace_seconds is {self.grace_seconds:g}; it is a number of seconds above 0")

    def is_due(self, taken: int) -> bool:
        """Whether a checkpoint is written after so many steps, whether or not more are taken."""
        return self.every > 0 and taken % self.every == 0

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Which checkpoints are kept of those that are there, by their steps in order."""
        firsts: dict[int, int] = {}
        for step in steps:
            if self.keep_every and step >= self.keep_every:
                firsts.setdefault(step // self.keep_every, step)
        return {*steps[-self.keep :], *firsts.values()}
