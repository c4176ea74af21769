"""A stack of layers run as a pipeline: its stages over a mesh axis, microbatches through them, one permute a tick.

The stages are one more dim of every array, split over the axis and mapped over: all devices run one program in
lockstep, with no branch that only some take, and a layer keeps its own shardings over the other axes of an explicit
mesh. A device that has nothing to do works on zeros, in time in which it would wait. What stands before and after the
layers is computed by all stages for each microbatch: before them by each for a share of it, or for all; after them on
what the last stage broadcasts.

With the schedule `gpipe` JAX makes backward of what is here; `pipeline_1f1b` goes forward and backward in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.cost.pipeline import Number, Schedule, Unit, chunk_layers
from meshwright.runtime.pipeline_entry import nothing_on, on_first
from meshwright.runtime.shards import STAGES

Tree = Any
"""Arrays in any pytree."""


class Made(NamedTuple):
    """What a layer makes of a microbatch.

    x: what the next layer gets. loss: what the layer itself adds to the loss of the microbatch. seen: arrays to sum
    over microbatches, through which no gradient goes.
    """

    x: Array
    loss: Array | None = None
    seen: Tree = None


class Turn(NamedTuple):
    """What each stage does in a tick, [p] each: the unit, or where it has none some other."""

    unit: Unit
    is_there: Array


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline runs, in which order; its functions work on arrays that know nothing of stages.

    first: (ends, input) -> x, what a microbatch starts as, whose first dim the stages may split. layer: (weights, x,
    input, number) -> what the layer of this number makes of x, finite for zeros. last: (ends, x, input) -> the scalar
    loss of a microbatch. ends: the parameters of what stands before and after the layers.
    """

    first: Callable[[Tree, Tree], Array]
    layer: Callable[[Tree, Array, Tree, Array], Made]
    last: Callable[[Tree, Array, Tree], Array]
    schedule: Schedule
    num_layers: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The layers of each chunk, in the order that tokens pass them."""
        return chunk_layers(self.num_layers, self.schedule.stages * self.schedule.virtual_stages)

    @property
    def stages(self) -> Array:
        """The number of each stage, [p]."""
        return jnp.arange(self.schedule.stages, out_sharding=P(STAGES))

    def turn(self, tick: Array) -> Turn:
        """What each stage does forward in a tick."""
        index = tick - self.stages
        return Turn(self.schedule.forward(within(index, self.schedule)), is_within(index, self.schedule))


class Given(NamedTuple):
    """What a pipeline works on: the parameters of its ends, those of its layers [p, v, c, ...], the microbatches."""

    ends: Tree
    weights: Tree
    inputs: Tree


def pipelined_loss(pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree) -> tuple[Array, Tree]:
    """The mean loss of microbatches, of which `inputs` has the arrays [m, ...]; JAX goes backward in mirror image.

    Beside it what layers have `seen`, stacked over slots. To be called under `jax.set_mesh` of an explicit mesh.
    layers: every parameter stacked over slots, in the order of `slot_layers`, that dim split over the stages. What
    `layer` keeps for backward is kept for all microbatches, so that it wants a remat policy of its own around `held`;
    of `first` and `last` the inputs are kept.
    """
    schedule, given = pipeline.schedule, Given(ends, by_chunk(layers, pipeline), inputs)
    pipeline = replace(pipeline, first=jax.checkpoint(pipeline.first), last=jax.checkpoint(pipeline.last))

    def tick(carry: tuple[Array, Sums], number: Array, *, is_full: bool) -> tuple[tuple[Array, Sums], None]:
        arriving, sums = carry
        x = entered(pipeline, given, arriving, schedule.forward(within(number, schedule)))
        x, _, sums = through(pipeline, given, x, pipeline.turn(number), sums)
        if is_full:
            sums = sums._replace(loss=sums.loss + loss_of(pipeline, given, x, number))
        return (hand_on(pipeline, x), sums), None

    carry = (no_stream(pipeline, given), no_sums(pipeline, given))
    for is_full, start, stop in ((False, 0, schedule.warm_up), (True, schedule.warm_up, schedule.ticks)):
        carry, _ = lax.scan(partial(tick, is_full=is_full), carry, jnp.arange(start, stop))
    return ended(pipeline, carry[1])


def held(layer: Callable[[Tree, Array, Tree, Array], Made]) -> Callable[[Tree, Array, Tree, Array], Made]:
    """A layer that does nothing with its weights before its input is there; to stand inside a remat policy.

    Else what depends on weights alone, as gathered weights, is the same in every tick, and JAX makes it of all layers
    at once before the first (JAX 0.10.2).
    """

    def waiting(weights: Tree, x: Array, part: Tree, number: Array) -> Made:
        weights, x = lax.optimization_barrier((weights, x))
        return layer(weights, x, part, number)

    return waiting


def within(index: Array, schedule: Schedule) -> Array:
    """The index of a unit, or the nearest one to an index of none."""
    return jnp.clip(index, 0, schedule.units - 1)


def is_within(index: Array, schedule: Schedule) -> Array:
    """Whether an index is that of a unit."""
    return (index >= 0) & (index < schedule.units)


def entered(pipeline: Pipeline, given: Given, arriving: Array, begun: Unit) -> Array:
    """What each stage works on, [p, ...]: what arrived, but what a microbatch starts as where one begins.

    begun: the unit of the first stage.
    """

    def joined() -> Array:
        return on_first(pipeline.first(given.ends, pick(given.inputs, begun.microbatch)), arriving)

    is_always = pipeline.schedule.virtual_stages == 1
    return joined() if is_always else lax.cond(begun.chunk == 0, joined, lambda: arriving)


class Sums(NamedTuple):
    """Sums over microbatches: of what `last` returns, and of what layers have made beside x, [p, v, c, ...]."""

    loss: Array
    made: Tree


def no_sums(pipeline: Pipeline, given: Given) -> Sums:
    """Zeros."""
    turn, stream = pipeline.turn(jnp.zeros((), int)), no_stream(pipeline, given)
    weights = jax.tree.map(lambda array: array[0], chunk(given, turn.unit, pipeline))
    number = layer_numbers(pipeline, turn.unit)[0]
    made = jax.eval_shape(jax.vmap(pipeline.layer), weights, stream, parts(given, turn.unit), number)
    dims = (pipeline.schedule.virtual_stages, max(pipeline.counts))

    def zeros(like: Any) -> Array:
        shape, spec = like.shape, like.sharding.spec
        return jnp.zeros((shape[0], *dims, *shape[1:]), like.dtype, out_sharding=P(spec[0], None, None, *spec[1:]))

    return Sums(jnp.zeros(()), jax.tree.map(zeros, (made.loss, made.seen)))


def ended(pipeline: Pipeline, sums: Sums) -> tuple[Array, Tree]:
    """The mean loss, and what was seen, stacked over slots."""
    of_layers, seen = sums.made
    loss = sums.loss if of_layers is None else sums.loss + jnp.sum(of_layers)
    return loss / pipeline.schedule.microbatches, jax.tree.map(in_slots, seen)


def in_slots(array: Array) -> Array:
    """An array [p, v, c, ...] as one stacked over slots."""
    spec = jax.typeof(array).sharding.spec
    return lax.reshape(array, (math.prod(array.shape[:3]), *array.shape[3:]), out_sharding=P(spec[0], *spec[3:]))


def through(pipeline: Pipeline, given: Given, x: Array, turn: Turn, sums: Sums) -> tuple[Array, Array, Sums]:
    """What each stage's chunk of layers makes of x [p, ...], the inputs of its layers [c, p, ...], and the sums."""
    ours = parts(given, turn.unit)

    def step(x: Array, layer: tuple[Tree, Array | None, Array]) -> tuple[Array, tuple[Array, Tree]]:
        weights, is_layer, number = layer
        made = jax.vmap(pipeline.layer)(weights, x, ours, number)
        is_counted = turn.is_there if is_layer is None else turn.is_there & is_layer
        beside_x = (made.loss, lax.stop_gradient(made.seen))
        counted = jax.tree.map(lambda y: jnp.where(beside(is_counted, y), y, 0), beside_x)
        return where_there(is_layer, made.x, x), (x, counted)

    items = (chunk(given, turn.unit, pipeline), layers_there(pipeline, turn.unit), layer_numbers(pipeline, turn.unit))
    x, (passed, made) = lax.scan(step, x, items)
    return x, passed, sums._replace(made=add_chunk(sums.made, made, turn.unit, pipeline))


def parts(given: Given, unit: Unit) -> Tree:
    """The microbatch that each stage works on, [p, ...]."""

    def take(array: Array) -> Array:
        spec = P(*jax.typeof(array).sharding.spec[1:])
        return jax.shard_map(
            lambda array, number: lax.dynamic_index_in_dim(array, number[0]),
            in_specs=(P(None, *spec), P(STAGES)),
            out_specs=P(STAGES, *spec),
        )(array, unit.microbatch)

    return jax.tree.map(take, given.inputs)


def add_chunk(total: Tree, of_chunk: Tree, unit: Unit, pipeline: Pipeline) -> Tree:
    """Arrays [p, v, c, ...] with those of each stage's chunk, [c, p, ...], added."""

    def add(total: Array, found: Array) -> Array:
        if pipeline.schedule.virtual_stages == 1:
            return total + jnp.moveaxis(found, 0, 1)[:, None]
        return jax.vmap(_add_at)(total, jnp.moveaxis(found, 0, 1), unit.chunk)

    return jax.tree.map(add, total, of_chunk)


def _add_at(total: Array, found: Array, index: Number) -> Array:
    """The array with another added to its row at an index."""
    row = lax.dynamic_index_in_dim(total, index, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + found, index, 0)


def loss_of(pipeline: Pipeline, given: Given, x: Array, tick: Array) -> Array:
    """The loss of the microbatch that the last stage is through with."""
    unit = pipeline.schedule.forward(tick - pipeline.schedule.stages + 1)

    def loss() -> Array:
        done = from_stage(pipeline, x, pipeline.schedule.stages - 1)
        return pipeline.last(given.ends, done, pick(given.inputs, unit.microbatch))

    last = pipeline.schedule.virtual_stages - 1
    return loss() if last == 0 else lax.cond(unit.chunk == last, loss, lambda: jnp.zeros(()))


def hand_on(pipeline: Pipeline, x: Array) -> Array:
    """What each stage gets from the one before it; what the last hands on goes to the first, for its next chunk."""
    count = pipeline.schedule.stages
    pairs = [(stage, (stage + 1) % count) for stage in range(count - (pipeline.schedule.virtual_stages == 1))]
    spec = jax.typeof(x).sharding.spec
    return jax.shard_map(lambda x: lax.ppermute(x, STAGES, pairs), in_specs=spec, out_specs=spec)(x)


def from_stage(pipeline: Pipeline, x: Array, stage: int) -> Array:
    """What one stage has of x [p, ...], on all of them."""
    # One term alone is no zero: `jnp.sum` would have it travel as float32.
    return lax.reduce_sum(jnp.where(beside(pipeline.stages == stage, x), x, 0), (0,))


def no_stream(pipeline: Pipeline, given: Given) -> Array:
    """Zeros [p, ...] like the stream of a microbatch on every stage."""
    like = jax.eval_shape(pipeline.first, given.ends, pick(given.inputs, 0))
    return nothing_on(like, pipeline.schedule.stages)


def by_chunk(layers: Tree, pipeline: Pipeline) -> Tree:
    """Parameters stacked over slots as [p, v, c, ...]."""
    schedule = pipeline.schedule
    dims = (schedule.stages, schedule.virtual_stages, max(pipeline.counts))

    def split(array: Array) -> Array:
        spec = jax.typeof(array).sharding.spec
        return lax.reshape(array, (*dims, *array.shape[1:]), out_sharding=P(spec[0], None, None, *spec[1:]))

    return jax.tree.map(split, layers)


def chunk(given: Given, unit: Unit, pipeline: Pipeline) -> Tree:
    """The parameters of the chunk that each stage works on, [c, p, ...]."""

    def take(array: Array) -> Array:
        if pipeline.schedule.virtual_stages == 1:
            return jnp.moveaxis(array[:, 0], 1, 0)
        return jax.vmap(partial(lax.dynamic_index_in_dim, keepdims=False), out_axes=1)(array, unit.chunk)

    return jax.tree.map(take, given.weights)


def layers_there(pipeline: Pipeline, unit: Unit) -> Array | None:
    """Which slots of each stage's chunk have a layer, [c, p]; None where all have."""
    counts = pipeline.counts
    least = min(counts)
    if least == max(counts):
        return None
    # The longer chunks, by one layer, are the first.
    count = least + (_chunk_number(pipeline, unit) < pipeline.num_layers - least * len(counts))
    return jnp.arange(max(counts))[:, None] < count[None]


def layer_numbers(pipeline: Pipeline, unit: Unit) -> Array:
    """The number of the layer in each slot of each stage's chunk, [c, p]; of empty slots that of the next one."""
    counts, number = pipeline.counts, _chunk_number(pipeline, unit)
    longer = jnp.minimum(number, pipeline.num_layers - min(counts) * len(counts))
    return jnp.arange(max(counts))[:, None] + (number * min(counts) + longer)[None]


def _chunk_number(pipeline: Pipeline, unit: Unit) -> Array:
    """The number of each stage's chunk in the order that tokens pass them, [p]."""
    return unit.chunk * pipeline.schedule.stages + pipeline.stages


def where_there(is_layer: Array | None, x: Array, other: Array) -> Array:
    """x [p, ...] of stages that have a layer, and of others the other array."""
    return x if is_layer is None else jnp.where(beside(is_layer, x), x, other)


def pick(inputs: Tree, microbatch: Array | int) -> Tree:
    """The arrays of one microbatch."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), inputs)


def beside(flags: Array, x: Array) -> Array:
    """Flags [p] as an array that goes with x [p, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))
