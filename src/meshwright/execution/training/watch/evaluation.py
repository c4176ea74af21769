"""Evaluation of a run: loss on held-out text, and multiple-choice tasks.

The programs read the state's sharded arrays without copies. The loss uses the forward pass of the training step, which
needs less memory than the whole step, so the planned peak is not exceeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.compiler import compiler_options
from meshwright.execution.training.gradients import evaluated_means
from meshwright.execution.training.preference.loss import MEANS
from meshwright.execution.training.run_directory.run import Row, RunConfig
from meshwright.execution.training.watch.tasks import Tasks


class HeldOutBatches(Protocol):
    """Batches to evaluate on."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Array]: ...

    def loss_tokens(self, number: int) -> int:
        """Return how many tokens of a batch have a loss."""
        ...


class HeldOutPairs(NamedTuple):
    """Held-out batches of preference pairs.

    Args:
        count: number of batches.
        batch: (policy parameters, number) -> a batch with its reference log-probabilities.
    """

    count: int
    batch: Callable[[Any, int], Mapping[str, Array]]


class _StoppedError(Exception):
    """Raised inside an evaluation when the run must stop."""


class Evaluator:
    """Evaluates parameters on the same batches and tasks each time.

    Args:
        config: config of the run.
        layout: how parameters are sharded.
        batches: all held-out batches; None if there are none.
        tasks: tasks to answer; None for none.

    Raises:
        MeshwrightError: there are neither batches nor tasks, or a number of batches is requested and there are none.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: ShardingContext,
        batches: HeldOutBatches | HeldOutPairs | None,
        tasks: Tasks | None = None,
    ) -> None:
        there = batches.count if isinstance(batches, HeldOutPairs) else len(batches or ())
        self._count = min(there, config.evaluating.batches or there)
        if not self._count and (tasks is None or config.evaluating.batches is not None):
            asked = "--eval-every" if tasks is None else "--eval-batches"
            raise MeshwrightError(
                f"{asked} needs text that is not trained on: --held-out SHARE of the data, or --eval-data PATH"
            )
        self._batches, self._tasks = batches, tasks

        self._pairs_of_batch = config.workload.batch

        def means(params: Any, batch: Mapping[str, Array]) -> Array:
            return evaluated_means(params, batch, config.workload, layout, config.strategy, config.preference)

        self._means = jax.jit(means, compiler_options=compiler_options())

    def __call__(self, params: Any, is_stopping: Callable[[], bool] = lambda: False) -> Row | None:
        """Evaluate parameters; return the metrics and the time taken (`eval_seconds`). Call under `jax.set_mesh`.

        is_stopping: called before each batch; if true, the evaluation is abandoned and the result is None.
        """
        began = time.perf_counter()
        row: Row = {}
        try:
            if isinstance(self._batches, HeldOutPairs):
                row |= self._of_pairs(params, self._batches, is_stopping)
            elif self._batches is not None and self._count:
                row |= self._losses(params, self._batches, is_stopping)
            if self._tasks is not None:
                row["eval_tasks"] = self._tasks(params)
        except _StoppedError:
            return None
        return row | {"eval_seconds": time.perf_counter() - began}

    def _numbers(self, is_stopping: Callable[[], bool]) -> Iterator[int]:
        """Yield batch numbers while the run continues."""
        for number in range(self._count):
            if is_stopping():
                raise _StoppedError
            yield number

    def _losses(self, params: Any, batches: HeldOutBatches, is_stopping: Callable[[], bool]) -> Row:
        """Return the mean loss per token in nats, its exponential (perplexity), and the number of tokens that count."""
        losses, counts = [], []
        for number in self._numbers(is_stopping):
            # Wait for each batch: simulated devices share cores, and collectives of overlapping batches would time out.
            losses.append(float(jax.device_get(self._means(params, batches[number])[0])))
            counts.append(batches.loss_tokens(number))
        tokens = sum(counts)
        mean = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) / tokens
        return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0)), "eval_tokens": tokens}

    def _of_pairs(self, params: Any, batches: HeldOutPairs, is_stopping: Callable[[], bool]) -> Row:
        """Return the means over all pairs, named by `MEANS`, and the number of pairs; all batches are of one size."""
        if not self._count:
            return {}
        found = [
            jax.device_get(self._means(params, batches.batch(params, number))) for number in self._numbers(is_stopping)
        ]
        means = (math.fsum(each) / len(found) for each in zip(*(batch.tolist() for batch in found), strict=True))
        pairs = self._count * self._pairs_of_batch
        return {f"eval_{name}": mean for name, mean in zip(MEANS, means, strict=True)} | {"eval_pairs": pairs}
