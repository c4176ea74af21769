"""What a run says of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When checkpoints are written.

    every: steps between them; 0 keeps the last only. grace_seconds: how long a run may take to end after a SIGTERM,
    its checkpoint included.
    """

    every: int = 0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 0:
            raise MeshwrightError(
                f"save_every is {self.every}; it is a whole number of steps, or 0 to keep the last only"
            )
        if self.grace_seconds <= 0:
            raise MeshwrightError(f"grace_seconds is {self.grace_seconds:g}; it is a number of seconds above 0")

    def is_due(self, taken: int) -> bool:
        """Whether a checkpoint is written after so many steps, whether or not more are taken."""
        return self.every > 0 and taken % self.every == 0
