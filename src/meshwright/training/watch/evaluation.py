"""The loss of a run on text that it does not train on, computed by the forward pass of its own step.

Parameters stay where they are: the program reads the sharded arrays of the state. Without a backward pass nothing is
kept for one, so that it needs less memory than the train step, and the plan's peak stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax
from jax import Array

from meshwright.errors import MeshwrightError
from meshwright.runtime import ShardingContext
from meshwright.training.compiler import compiler_options
from meshwright.training.gradients import mean_cross_entropy
from meshwright.training.run_directory.run import Row, RunConfig


class HeldOutBatches(Protocol):
    """Batches to evaluate on."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Array]: ...

    def loss_tokens(self, number: int) -> int:
        """The tokens of a batch whose loss counts."""
        ...


class Evaluator:
    """Evaluates parameters on the same batches each time.

    Args:
        config: of the run. layout: how parameters are stored. batches: all that are held out.

    Raises:
        MeshwrightError: where there is no batch.
    """

    def __init__(self, config: RunConfig, layout: ShardingContext, batches: HeldOutBatches) -> None:
        if not len(batches):
            raise MeshwrightError(
                "--eval-every needs text that is not trained on: --held-out SHARE of the data, or --eval-data PATH"
            )
        self._batches = batches
        self._count = min(len(batches), config.evaluating.batches or len(batches))

        def loss(params: Any, batch: Mapping[str, Array]) -> Array:
            return mean_cross_entropy(params, batch, config.workload, layout, config.strategy)

        self._loss = jax.jit(loss, compiler_options=compiler_options())

    def __call__(self, params: Any) -> Row:
        """The mean loss of a token in nats, its exponential, the tokens that count, and what it took (`eval_seconds`).

        To be called under `jax.set_mesh`.
        """
        began = time.perf_counter()
        losses, counts = [], []
        for number in range(self._count):
            # Read one by one: simulated devices, which share cores, would time out on each other.
            losses.append(float(jax.device_get(self._loss(params, self._batches[number]))))
            counts.append(self._batches.loss_tokens(number))
        tokens = sum(counts)
        mean = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) / tokens
        return {
            "eval_loss": mean,
            "eval_perplexity": math.exp(min(mean, 700.0)),
            "eval_tokens": tokens,
            "eval_seconds": time.perf_counter() - began,
        }
