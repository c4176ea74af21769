"""Settings of evaluation and of metric outputs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Metric outputs besides `metrics.jsonl` and TensorBoard events, which are always written.

    Args:
        wandb: Weights & Biases project, which requires its library; None for no such output.
        profile: first and last step to trace, counted from 1, such as `10:15`; None for no trace.
    """

    wandb: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.wandb is not None and not self.wandb.strip():
            raise MeshwrightError("wandb is empty; it is the name of a project of Weights & Biases")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When a run is evaluated, and on which data.

    Args:
        every: steps between evaluations; the last step is always evaluated too. 0 for no evaluation.
        batches: maximum number of batches of an evaluation, with the shape of the run's batches; None for all.
        data: files to evaluate on, as in `DataConfig.sources`; by default the held-out share of the run's data.
        tasks: files of multiple-choice questions, in the format of `models.inference.tasks.read_task`.
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
            raise MeshwrightError(f"{idle[0]} has no effect without eval_every; say how often to evaluate")

    def is_due(self, taken: int) -> bool:
        """Whether a periodic evaluation is due after `taken` steps. The evaluation at the end does not count."""
        return self.every > 0 and taken % self.every == 0
