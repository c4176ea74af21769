"""Checkpoint settings of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.options.values import Count, read_count
from meshwright.support.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When checkpoints are written, and which are kept.

    Args:
        every: number of steps between checkpoints; 0 for none. A checkpoint is always written after the last step.
        minutes: minutes between checkpoints; 0 for none.
        keep: number of latest checkpoints to keep.
        keep_every: keep also the first checkpoint in each interval of `keep_every` steps, except before the first
            `keep_every` steps; 0 for none.
        grace_seconds: seconds to save and exit after a SIGTERM.
    """

    every: int = 0
    minutes: float = 30.0
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
            raise MeshwrightError(f"saving.minutes is {self.minutes:g}; it is a number of minutes, or 0 for none")
        if self.keep < 1:
            raise MeshwrightError(f"keep is {self.keep}; it is a whole number of checkpoints from 1")
        if self.keep_every < 0:
            raise MeshwrightError(f"keep_every is {self.keep_every}; it is a whole number of steps, or 0 for none")
        if self.grace_seconds <= 0:
            raise MeshwrightError(f"grace_seconds is {self.grace_seconds:g}; it is a number of seconds above 0")

    def is_due(self, taken: int) -> bool:
        """Whether `every` makes a checkpoint due after `taken` steps."""
        return self.every > 0 and taken % self.every == 0

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the steps of the checkpoints to keep. steps: the steps of all checkpoints, ascending."""
        firsts: dict[int, int] = {}
        for step in steps:
            if self.keep_every and step >= self.keep_every:
                firsts.setdefault(step // self.keep_every, step)
        return {*steps[-self.keep :], *firsts.values()}


_MINUTES = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0}


def read_save_every(value: Count) -> dict[str, int | float]:
    """Return the fields `every` and `minutes` of `Saving`, from a number of steps or a time such as 30m, 1h or 90s.

    Raises:
        MeshwrightError: the value is neither a number of steps nor a time.

    >>> read_save_every("1h")
    {'every': 0, 'minutes': 60.0}
    """
    if isinstance(value, str) and (found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s?(s|m|min|h)", value.strip())):
        return {"every": 0, "minutes": float(found[1]) * _MINUTES[found[2]]}
    if value in (0, "0"):
        return {"every": 0, "minutes": 0.0}
    try:
        return {"every": read_count("save_every", value), "minutes": 0.0}
    except MeshwrightError:
        raise MeshwrightError(
            f"save_every is {value}; it is a number of steps, as 500, a time, as 30m or 1h, or 0 for the last only"
        ) from None
