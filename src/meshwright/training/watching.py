"""What a run says of its evaluation, and of where its metrics go."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
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


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and on what a run is evaluated.

    every: steps between evaluations, of which the last step has one too; 0 for none. batches: the most batches of one,
    each of the run's shape; None for all there are. data: files to evaluate on, as `DataConfig.sources`; by default the
    share of the data that is held out. tasks: files of multiple-choice questions, as `inference.tasks.read_task` reads
    them.
    """

    every: int = 0
    batches: int | None = None
    data: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 0:
            raise MeshwrightError(f"eval_every is {self.every}; it is a whole number of steps, or 0 for no evaluation")
        if self.batches is not None and self.batches < 1:
            raise MeshwrightError(f"eval_batches is {self.batches}; it is a whole number from 1")
        given = {
            "eval_batches": self.batches is not None,
            "eval_data": bool(self.data),
            "eval_tasks": bool(self.tasks),
        }
        if not self.every and (idle := [name for name, is_given in given.items() if is_given]):
            raise MeshwrightError(f"{idle[0]} changes nothing without eval_every; say how often to evaluate")

    def is_due(self, taken: int) -> bool:
        """Whether a run is evaluated after so many steps, whether or not more are taken."""
        return self.every > 0 and taken % self.every == 0
