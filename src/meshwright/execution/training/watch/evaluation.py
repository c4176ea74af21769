"""Evaluation of a run: loss on held-out text or preference pairs, and multiple-choice tasks.

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
    """Batches to evaluate on, by number from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Array]: ...

    def loss_tokens(self, number: int) -> int:
        """Return how many tokens of a batch count in the loss."""
        ...


class HeldOutPairs(NamedTuple):
    """Batches of preference pairs to evaluate on.

    Args:
        count: number of batches.
        batch: (policy's parameters, number of a batch) -> the batch, with its reference log-probabilities.
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
        tasks: multiple-choice tasks to answer; None for none.

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
        """Evaluate parameters. Return metrics by name, with the time as `eval_seconds`. Call under `jax.set_mesh`.

        is_stopping: called before each batch. If it returns True, the evaluation is abandoned and the result is None.
        """
        began = time.perf_counter()
        row: Row = {}
        try:
            if isinstance(self._batches, HeldOutPairs):
                row |= self._pair_means(params, self._batches, is_stopping)
            elif self._batches is not None and self._count:
                row |= self._losses(params, self._batches, is_stopping)
            if self._tasks is not None:
                row["eval_tasks"] = self._tasks(params)
        except _StoppedError:
            return None
        return row | {"eval_seconds": time.perf_counter() - began}

    def _numbers(self, is_stopping: Callable[[], bool]) -> Iterator[int]:
        """Yield the numbers of the batches to evaluate; raise `_StoppedError` if the run must stop."""
        for number in range(self._count):
            if is_stopping():
                raise _StoppedError
            yield number

    def _losses(self, params: Any, batches: HeldOutBatches, is_stopping: Callable[[], bool]) -> Row:
        """Return `eval_loss`, the mean loss per token in nats; `eval_perplexity`, its exponential; `eval_tokens`."""
        losses, counts = [], []
        for number in self._numbers(is_stopping):
            # Wait for each batch: simulated devices share cores, so collectives of overlapping batches would time out.
            losses.append(float(jax.device_get(self._means(params, batches[number])[0])))
            counts.append(batches.loss_tokens(number))
        tokens = sum(counts)
        mean = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) / tokens
        return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0)), "eval_tokens": tokens}

    def _pair_means(self, params: Any, batches: HeldOutPairs, is_stopping: Callable[[], bool]) -> Row:
        """Return the means over all preference pairs, named `eval_` + `MEANS`, and their number as `eval_pairs`.

        All batches have the same number of pairs, so the mean of their means is the mean over pairs.
        """
        if not self._count:
            return {}
        found = [
            jax.device_get(self._means(params, batches.batch(params, number))) for number in self._numbers(is_stopping)
        ]
        means = (math.fsum(each) / len(found) for each in zip(*(batch.tolist() for batch in found), strict=True))
        pairs = self._count * self._pairs_of_batch
        return {f"eval_{name}": mean for name, mean in zip(MEANS, means, strict=True)} | {"eval_pairs": pairs}
