"""The decoder with its layers as the stages of a pipeline: the same loss, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.cost.pipeline import Schedule
from meshwright.errors import MeshwrightError
from meshwright.models.decoder import KEPT, Weights, block, cross_entropy, embed, logits, rematerialized, table_in_use
from meshwright.parallel import Layout, Pipeline, alternating_loss, held, pipelined_loss
from meshwright.workload import ModelConfig, Remat, Strategy


def staged_loss(
    params: Weights,
    batch: Mapping[str, Array],
    model: ModelConfig,
    layout: Layout,
    *,
    strategy: Strategy,
    dtype: Any,
    remat: Remat,
) -> Array:
    """The mean loss in nats of `batch`, as `loss` has it, by the schedule of the strategy over pp.

    The rules of the layout split `layers` over pp, and may split `vocab`, whose products all stages then share. Raises
    where the microbatches do not divide the batch, or the schedule does not keep what `remat` says.
    """
    _check(strategy, remat, batch)
    schedule = Schedule(stages=layout.mesh.pp, microbatches=strategy.num_microbatches, kind=strategy.schedule)

    def first(ends: Weights, part: Mapping[str, Array]) -> Array:
        return embed(ends, part["tokens"], layout, dtype)[0]

    def layer(weights: Weights, x: Array) -> Array:
        return block(x, weights, jnp.arange(x.shape[1]), model, layout, strategy=strategy)[0]

    def last(ends: Weights, x: Array, part: Mapping[str, Array]) -> Array:
        with jax.named_scope("loss"):
            scores = logits(ends, x, table_in_use(ends, layout, dtype), model, layout)
            return cross_entropy(scores, part["targets"])

    pipeline = Pipeline(first, rematerialized(held(layer), remat), last, schedule, model.num_layers)
    run = alternating_loss if schedule.kind == "1f1b" else pipelined_loss
    ends = {name: weights for name, weights in params.items() if name != "layers"}
    parts = {name: microbatches(array, schedule.microbatches, layout) for name, array in batch.items()}
    return run(pipeline, ends, params["layers"], parts)


def microbatches(batch: Array, count: int, layout: Layout) -> Array:
    """An array [b, s] as its microbatches [m, b / m, s], of which every device has its share already."""
    size, length = batch.shape
    shards = layout.mesh.degree(layout.axes("batch"))
    if size % (shards * count):
        raise MeshwrightError(
            f"batch {size} cannot be cut into {count} microbatches on {shards} shards:"
            f" {size} % {shards * count} = {size % (shards * count)}; use a multiple of {shards * count}"
        )
    split, length_split = layout.spec("batch", "sequence")
    cut = lax.reshape(batch, (size // count, count, length), out_sharding=P(split, None, length_split))
    return jnp.moveaxis(cut, 1, 0)


def _check(strategy: Strategy, remat: Remat, batch: Mapping[str, Array]) -> None:
    """Raise where a schedule keeps something else for backward than a remat policy says, or tokens have places."""
    if "positions" in batch:
        raise MeshwrightError("a batch with positions does not run over pp yet, where tokens lie in order; use pp=1")
    kept = ("block",) if strategy.schedule == "1f1b" else tuple(KEPT)
    if remat not in kept:
        raise MeshwrightError(
            f"remat {remat} can be planned with the schedule {strategy.schedule}, but what runs keeps with it"
            f" {' or '.join(kept)}; gpipe keeps {', '.join(KEPT)}"
        )
