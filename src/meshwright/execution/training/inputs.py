"""Inputs of the training steps: batches of text, or of preference pairs with their reference log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jax import Array
from jax.sharding import Mesh, NamedSharding

from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.execution.training.data.batches import Batches
from meshwright.execution.training.data.pair_batches import PairBatches
from meshwright.execution.training.data.run_data import RunData, open_data
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.step import State
from meshwright.execution.training.watch.evaluation import HeldOutBatches, HeldOutPairs


class StepInputs(NamedTuple):
    """Inputs of the training steps.

    Args:
        batches: the batch of any step, by its number.
        held_out: batches to evaluate on; None for no such data.
        prepare: (state, batch) -> the batch that the step takes; it adds the log-probabilities of a live reference.
        keep: writes what resuming needs of the reference model; all processes call it after the first step.
        counts: sizes of the data, for the first row of metrics: `data` as in `Batches.sizes`, or the number of pairs.
    """

    batches: Batches | PairBatches
    held_out: HeldOutBatches | HeldOutPairs | None
    prepare: Callable[[State, Mapping[str, Any]], Mapping[str, Array]] = lambda _, batch: batch
    keep: Callable[[], None] = lambda: None
    counts: Mapping[str, Any] = MappingProxyType({})


def text_inputs(
    config: RunConfig, data: RunData, layout: ShardingContext, mesh: Mesh, tokenizer: Tokenizer | None, on_note: Note
) -> StepInputs:
    """Return the inputs of a run on text or records.

    Evaluation uses the files that the config names, else the held-out share of the run's data.
    """
    workload = config.workload
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    order = token_order(workload.seq_len, layout, config.strategy)
    shape = (workload.batch, workload.seq_len)
    batches = Batches(data, sharding, shape, seed=config.seed, order=order, draws=config.draws)
    held_out = batches.held_out
    if config.evaluating.data:
        other = replace(config.data, sources=config.evaluating.data, held_out=0.0)
        held_out = batches.in_order(open_data(other, workload, tokenizer, seed=config.seed, on_note=on_note).training)
    return StepInputs(batches, held_out, counts={"data": batches.sizes(config.steps)})
