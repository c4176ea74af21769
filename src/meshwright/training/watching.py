"""What a run says of how it is watched."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Where metrics go beside `metrics.jsonl` and TensorBoard's events, which are always written.

    wandb: the project of Weights & Biases, whose library is then needed; None for none. profile: the first and the last
    step of a trace, counted from 1, as `10:15`; None for none.
    """

    wandb: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.wandb is not None and not self.wandb.strip():
            raise MeshwrightError("wandb is empty; it is the name of a project of Weights & Biases")
