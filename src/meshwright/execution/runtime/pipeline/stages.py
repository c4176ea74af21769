"""Pipeline parallelism as one SPMD program: stages over a mesh axis, one permute per tick.

Every array has an extra dim for the stages, sharded over the axis and mapped over. All devices run one program in
lockstep without diverging branches, and a layer keeps its shardings over the other axes of an explicit mesh. An idle
device computes on zeros instead of waiting. Every stage computes the embedding, for its share of a microbatch or for
all of it, and the whole output head, on the output that the last stage broadcasts.

A tick is one iteration of the program's loop over time. Layers of several kinds repeat in cycles, of one layer of each
kind; if all layers are alike, a cycle is one layer. A stage has one or more chunks of consecutive cycles (virtual
stages), each with a slot for every cycle; the slot of a shorter chunk's missing cycle is empty. A unit is one
microbatch in one chunk. Dims: p stages, v chunks of a stage, c slots of a chunk, m microbatches.

The schedules are in `gpipe` and `one_forward_one_backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.passes.schedule import Number, Schedule, Unit, chunk_layers
from meshwright.execution.runtime.pipeline.inject import inject_on_first_stage, zeros_on_stages
from meshwright.execution.runtime.shards import STAGES

Tree = Any
"""A pytree of arrays."""


class LayerOutput(NamedTuple):
    """The output of a layer for a microbatch.

    x: the next layer's input. loss: the layer's own contribution to the microbatch's loss. stats: arrays to sum over
    microbatches, without gradient.
    """

    x: Array
    loss: Array | None = None
    stats: Tree = None


Layer = Callable[[Tree, Array, Tree, Array], LayerOutput]
"""The function of a layer (`Pipeline.layers`)."""


class StageWork(NamedTuple):
    """The forward work of each stage in a tick, [p] each.

    unit: the unit that the stage runs. is_active: whether it runs one; if not, `unit` is arbitrary.
    """

    unit: Unit
    is_active: Array


@dataclass(frozen=True)
class Pipeline:
    """The functions and the schedule of a pipeline. The functions work on arrays without a stage dim.

    Attributes:
        first: (ends, input) -> x, the input of the first layer for a microbatch `input`; its first dim may be sharded
            over stages. `ends` are the parameters before and after the layers (embedding, head).
        layers: for each layer of a cycle, (weights, x, input, number) -> its output in cycle `number`, which must be
            finite if x is zeros.
        last: (ends, x, input) -> the loss of a microbatch: a scalar, or parts [n] that add up to it.
        schedule: the order of the units.
        num_cycles: number of cycles of layers in the stages.
        loss_shape: the shape of `last`'s result.
    """

    first: Callable[[Tree, Tree], Array]
    layers: tuple[Layer, ...]
    last: Callable[[Tree, Array, Tree], Array]
    schedule: Schedule
    num_cycles: int
    loss_shape: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of cycles of each chunk of all stages, in the order in which tokens pass through the chunks."""
        return chunk_layers(self.num_cycles, self.schedule.stages * self.schedule.virtual_stages)

    @property
    def stages(self) -> Array:
        """The indices of the stages [p], sharded over stages."""
        return jnp.arange(self.schedule.stages, out_sharding=P(STAGES))

    def stage_work(self, tick: Array) -> StageWork:
        """Return the forward work of each stage in a tick."""
        index = tick - self.stages
        return StageWork(self.schedule.forward(clip_unit(index, self.schedule)), is_unit(index, self.schedule))


class PipelineData(NamedTuple):
    """The data of a pipeline.

    ends: parameters of the ends. weights: for each layer of a cycle, its parameters [p, v, c, ...]. inputs: the
    microbatches [m, ...].
    """

    ends: Tree
    weights: tuple[Tree, ...]
    inputs: Tree


def clip_unit(index: Array, schedule: Schedule) -> Array:
    """Clip the index of a unit, in a stage's order of forward passes, to the valid range."""
    return jnp.clip(index, 0, schedule.units - 1)


def is_unit(index: Array, schedule: Schedule) -> Array:
    """Whether an index is that of a unit, and not before the first or after the last."""
    return (index >= 0) & (index < schedule.units)


def inject(pipeline: Pipeline, data: PipelineData, arriving: Array, begun: Unit) -> Array:
    """Return the input of each stage [p, ...]: `arriving`, but on the first stage a new microbatch when one starts.

    begun: the unit that the first stage runs; a microbatch starts if the unit's chunk is 0.
    """

    def joined() -> Array:
        return inject_on_first_stage(
            pipeline.first(data.ends, select_microbatch(data.inputs, begun.microbatch)), arriving
        )

    is_always = pipeline.schedule.virtual_stages == 1
    return joined() if is_always else lax.cond(begun.chunk == 0, joined, lambda: arriving)


class Sums(NamedTuple):
    """Sums over microbatches.

    loss: the sum of the results of `Pipeline.last`. of_layers: for each layer of a cycle, the sums of its (loss, stats)
    [p, v, c, ...].
    """

    loss: Array
    of_layers: tuple[tuple[Array | None, Tree], ...]


def zero_sums(pipeline: Pipeline, data: PipelineData) -> Sums:
    """Return the sums before the first microbatch: zeros."""
    stage_work, stream = pipeline.stage_work(jnp.zeros((), int)), zero_stream(pipeline, data)
    weights = jax.tree.map(lambda array: array[0], chunk(data, stage_work.unit, pipeline))
    number = cycle_numbers(pipeline, stage_work.unit)[0]
    ours, made = stage_inputs(data, stage_work.unit), []
    for layer, own in zip(pipeline.layers, weights, strict=True):
        output = jax.eval_shape(jax.vmap(layer), own, stream, ours, number)
        made.append((output.loss, output.stats))
    dims = (pipeline.schedule.virtual_stages, max(pipeline.counts))

    def zeros(like: Any) -> Array:
        shape, spec = like.shape, like.sharding.spec
        return jnp.zeros((shape[0], *dims, *shape[1:]), like.dtype, out_sharding=P(spec[0], None, None, *spec[1:]))

    return Sums(jnp.zeros(pipeline.loss_shape), jax.tree.map(zeros, tuple(made)))


def mean_loss(pipeline: Pipeline, sums: Sums) -> tuple[Array, tuple[Array, Tree]]:
    """Return (mean loss, (mean result of `Pipeline.last`, stats [slots, ...])), given sums over microbatches.

    The mean loss includes the layers' losses. The second part has no gradient; its stats are those of each layer of a
    cycle.
    """
    means = sums.loss / pipeline.schedule.microbatches
    loss = jnp.sum(means)
    for losses, _ in sums.of_layers:
        if losses is not None:
            loss += jnp.sum(losses) / pipeline.schedule.microbatches
    stats = tuple(jax.tree.map(flatten_slots, of_layer) for _, of_layer in sums.of_layers)
    return loss, (lax.stop_gradient(means), stats)


def flatten_slots(array: Array) -> Array:
    """Reshape [p, v, c, ...] to [slots, ...], with the slots of all stages in one dim."""
    spec = jax.typeof(array).sharding.spec
    return lax.reshape(array, (math.prod(array.shape[:3]), *array.shape[3:]), out_sharding=P(spec[0], *spec[3:]))


def stage_forward(
    pipeline: Pipeline, data: PipelineData, x: Array, stage_work: StageWork, sums: Sums
) -> tuple[Array, tuple[Array, ...], Sums]:
    """Run one unit on each stage, with input x [p, ...].

    Returns the output of each stage [p, ...], the inputs of the layers of its chunk, for each layer of a cycle
    [c, p, ...], and the updated sums.
    """
    ours = stage_inputs(data, stage_work.unit)

    def step(x: Array, cycle: tuple[tuple[Tree, ...], Array | None, Array]) -> tuple[Array, tuple[Any, Tree]]:
        weights, is_cycle, number = cycle
        is_counted = stage_work.is_active if is_cycle is None else stage_work.is_active & is_cycle
        start, layer_inputs, beside_x = x, list[Array](), list[Tree]()
        for layer, own in zip(pipeline.layers, weights, strict=True):
            layer_inputs.append(x)
            made = jax.vmap(layer)(own, x, ours, number)
            beside_x.append((made.loss, lax.stop_gradient(made.stats)))
            x = made.x
        counted = jax.tree.map(lambda y: jnp.where(broadcast_flags(is_counted, y), y, 0), tuple(beside_x))
        return where_active(is_cycle, x, start), (tuple(layer_inputs), counted)

    items = (
        chunk(data, stage_work.unit, pipeline),
        active_slots(pipeline, stage_work.unit),
        cycle_numbers(pipeline, stage_work.unit),
    )
    x, (layer_inputs, made) = lax.scan(step, x, items)
    return x, layer_inputs, sums._replace(of_layers=add_chunk(sums.of_layers, made, stage_work.unit, pipeline))


def stage_inputs(data: PipelineData, unit: Unit) -> Tree:
    """Return the microbatch of each stage's unit [p, ...]."""

    def take(array: Array) -> Array:
        spec = P(*jax.typeof(array).sharding.spec[1:])
        return jax.shard_map(
            lambda array, number: lax.dynamic_index_in_dim(array, number[0]),
            in_specs=(P(None, *spec), P(STAGES)),
            out_specs=P(STAGES, *spec),
        )(array, unit.microbatch)

    return jax.tree.map(take, data.inputs)


def add_chunk(total: Tree, of_chunk: Tree, unit: Unit, pipeline: Pipeline) -> Tree:
    """Return totals [p, v, c, ...] with the arrays [c, p, ...] of the chunk of each stage's unit added."""

    def add(total: Array, found: Array) -> Array:
        if pipeline.schedule.virtual_stages == 1:
            return total + jnp.moveaxis(found, 0, 1)[:, None]
        return jax.vmap(_add_at)(total, jnp.moveaxis(found, 0, 1), unit.chunk)

    return jax.tree.map(add, total, of_chunk)


def _add_at(total: Array, found: Array, index: Number) -> Array:
    row = lax.dynamic_index_in_dim(total, index, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + found, index, 0)


def last_stage_loss(pipeline: Pipeline, data: PipelineData, x: Array, tick: Array) -> Array:
    """Return the loss of the microbatch that the last stage finishes in a tick; zeros if it finishes none.

    x: the output of each stage [p, ...].
    """
    unit = pipeline.schedule.forward(tick - pipeline.schedule.stages + 1)

    def loss() -> Array:
        # `jnp.sum` would communicate in float32; a sum with one nonzero term is exact in any dtype.
        is_last = broadcast_flags(pipeline.stages == pipeline.schedule.stages - 1, x)
        done = lax.reduce_sum(jnp.where(is_last, x, 0), (0,))
        return pipeline.last(data.ends, done, select_microbatch(data.inputs, unit.microbatch))

    last = pipeline.schedule.virtual_stages - 1
    return loss() if last == 0 else lax.cond(unit.chunk == last, loss, lambda: jnp.zeros(pipeline.loss_shape))


def send_to_next(pipeline: Pipeline, x: Array) -> Array:
    """Send each stage's output x [p, ...] to the next stage, and return the values received.

    With virtual stages the last stage sends to the first.
    """
    count = pipeline.schedule.stages
    pairs = [(stage, (stage + 1) % count) for stage in range(count - (pipeline.schedule.virtual_stages == 1))]
    spec = jax.typeof(x).sharding.spec
    return jax.shard_map(lambda x: lax.ppermute(x, STAGES, pairs), in_specs=spec, out_specs=spec)(x)


def zero_stream(pipeline: Pipeline, data: PipelineData) -> Array:
    """Return zeros [p, ...], shaped like the result of `Pipeline.first` on every stage."""
    like = jax.eval_shape(pipeline.first, data.ends, select_microbatch(data.inputs, 0))
    return zeros_on_stages(like, pipeline.schedule.stages)


def by_chunk(layers: Tree, pipeline: Pipeline) -> Tree:
    """Reshape parameters [slots, ...] to [p, v, c, ...]."""
    schedule = pipeline.schedule
    dims = (schedule.stages, schedule.virtual_stages, max(pipeline.counts))

    def split(array: Array) -> Array:
        spec = jax.typeof(array).sharding.spec
        return lax.reshape(array, (*dims, *array.shape[1:]), out_sharding=P(spec[0], None, None, *spec[1:]))

    return jax.tree.map(split, layers)


def chunk(data: PipelineData, unit: Unit, pipeline: Pipeline) -> Tree:
    """Return the parameters of the chunk of each stage's unit [c, p, ...]."""

    def take(array: Array) -> Array:
        if pipeline.schedule.virtual_stages == 1:
            return jnp.moveaxis(array[:, 0], 1, 0)
        return jax.vmap(partial(lax.dynamic_index_in_dim, keepdims=False), out_axes=1)(array, unit.chunk)

    return jax.tree.map(take, data.weights)


def active_slots(pipeline: Pipeline, unit: Unit) -> Array | None:
    """Return a boolean [slots of a chunk, stages]: whether a slot of each stage's current chunk has a cycle of layers.

    None if all slots have one. `unit`: the microbatch and the chunk that each stage runs in this tick.
    """
    counts = pipeline.counts
    least = min(counts)
    if least == max(counts):
        return None
    # The first chunks are one cycle longer.
    is_longer = _chunk_number(pipeline, unit) < pipeline.num_cycles - least * len(counts)
    count = least + is_longer.astype(jnp.int32)
    return jnp.arange(max(counts))[:, None] < count[None]


def cycle_numbers(pipeline: Pipeline, unit: Unit) -> Array:
    """Return the number of the cycle in each slot of the chunk of each stage's unit [c, p].

    An empty slot has the number of the next cycle.
    """
    counts, number = pipeline.counts, _chunk_number(pipeline, unit)
    longer = jnp.minimum(number, pipeline.num_cycles - min(counts) * len(counts))
    return jnp.arange(max(counts))[:, None] + (number * min(counts) + longer)[None]


def _chunk_number(pipeline: Pipeline, unit: Unit) -> Array:
    """Return the index of the chunk of each stage's unit, in the order in which tokens pass through all chunks [p]."""
    return unit.chunk * pipeline.schedule.stages + pipeline.stages


def where_active(is_cycle: Array | None, x: Array, other: Array) -> Array:
    """Return x [p, ...] on stages where is_cycle [p] is True, and `other` elsewhere; x if is_cycle is None."""
    return x if is_cycle is None else jnp.where(broadcast_flags(is_cycle, x), x, other)


def select_microbatch(inputs: Tree, microbatch: Array | int) -> Tree:
    """Return the arrays of one microbatch, given those of all microbatches [m, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), inputs)


def broadcast_flags(flags: Array, x: Array) -> Array:
    """Reshape flags [p] so that they broadcast against x [p, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))
