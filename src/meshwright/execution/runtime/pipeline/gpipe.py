"""GPipe: all microbatches run forward, then all backward, by JAX's automatic differentiation of the forward loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.execution.runtime.pipeline.stages import (
    Layer,
    LayerOutput,
    Pipeline,
    PipelineData,
    Sums,
    Tree,
    by_chunk,
    clip_unit,
    inject,
    last_stage_loss,
    mean_loss,
    send_to_next,
    stage_forward,
    zero_stream,
    zero_sums,
)


def pipelined_loss(
    pipeline: Pipeline, ends: Tree, layers: tuple[Tree, ...], inputs: Tree
) -> tuple[Array, tuple[Array, Tree]]:
    """Return the loss of a batch, as `mean_loss` does: (mean loss, (mean result of `pipeline.last`, layers' stats)).

    Call it under `jax.set_mesh` of an explicit mesh. Values that `pipeline.layers` save for backward are saved for all
    microbatches, so each layer needs a remat policy around `wait_for_input`. Of `pipeline.first` and `pipeline.last`
    only the inputs are saved.

    Args:
        ends: parameters of `pipeline.first` and `pipeline.last`.
        layers: parameters of each layer of a cycle, stacked over slots in the order of `slot_layers`; slots are sharded
            over stages.
        inputs: the microbatches [m, ...].
    """
    schedule, data = pipeline.schedule, PipelineData(ends, by_chunk(layers, pipeline), inputs)
    pipeline = replace(pipeline, first=jax.checkpoint(pipeline.first), last=jax.checkpoint(pipeline.last))

    def tick(carry: tuple[Array, Sums], number: Array, *, is_full: bool) -> tuple[tuple[Array, Sums], None]:
        arriving, sums = carry
        x = inject(pipeline, data, arriving, schedule.forward(clip_unit(number, schedule)))
        x, _, sums = stage_forward(pipeline, data, x, pipeline.stage_work(number), sums)
        if is_full:
            sums = sums._replace(loss=sums.loss + last_stage_loss(pipeline, data, x, number))
        return (send_to_next(pipeline, x), sums), None

    carry = (zero_stream(pipeline, data), zero_sums(pipeline, data))
    for is_full, start, stop in ((False, 0, schedule.warm_up), (True, schedule.warm_up, schedule.ticks)):
        carry, _ = lax.scan(partial(tick, is_full=is_full), carry, jnp.arange(start, stop))
    return mean_loss(pipeline, carry[1])


def wait_for_input(layer: Layer) -> Layer:
    """Return a layer function whose weights are not used before its input is ready (optimization barrier).

    Values that depend only on weights, for example gathered weights, are equal in all ticks, so without the barrier JAX
    would compute those of all layers before the first layer (JAX 0.10.2). Apply this inside a remat policy.
    """

    def waiting(weights: Tree, x: Array, part: Tree, number: Array) -> LayerOutput:
        weights, x = lax.optimization_barrier((weights, x))
        return layer(weights, x, part, number)

    return waiting
