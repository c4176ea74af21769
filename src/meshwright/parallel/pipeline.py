"""A stack of layers run as a pipeline: its stages over a mesh axis, microbatches through them, one permute a tick.

The stages are one more dim of every array, split over the axis and mapped over: all devices run one program in
lockstep, with no branch that only some take, and a layer keeps its own shardings over the other axes of an explicit
mesh. A device that has nothing to do works on zeros, in time in which it would wait. What stands before and after the
layers is computed by all stages for each microbatch, on what the last stage broadcasts.

With the schedule `gpipe` JAX makes backward of what is here; `pipeline_1f1b` goes forward and backward in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.cost.pipeline import Schedule, Unit, chunk_layers

Tree = Any
"""Arrays in any pytree."""

AXIS = "pp"
"""The mesh axis of the stages."""


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline runs, in which order; its functions work on arrays that know nothing of stages.

    first: (ends, input) -> x, what a microbatch starts as. layer: (weights, x) -> x, finite for zeros. last: (ends, x,
    input) -> the scalar loss of a microbatch. ends: the parameters of what stands before and after the layers.
    """

    first: Callable[[Tree, Tree], Array]
    layer: Callable[[Tree, Array], Array]
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
        return jnp.arange(self.schedule.stages, out_sharding=P(AXIS))

    def forward_unit(self, tick: Array) -> Unit:
        """The unit that each stage does forward in a tick, [p] each; where it has none, some other."""
        return self.schedule.forward(within(tick - self.stages, self.schedule))


class Given(NamedTuple):
    """What a pipeline works on: the parameters of its ends, those of its layers [p, v, c, ...], the microbatches."""

    ends: Tree
    weights: Tree
    inputs: Tree


def pipelined_loss(pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree) -> Array:
    """The mean loss of microbatches, of which `inputs` has the arrays [m, ...]; JAX goes backward in mirror image.

    To be called under `jax.set_mesh` of an explicit mesh. layers: every parameter stacked over slots, in the order of
    `slot_layers`, that dim split over the stages. What `layer` keeps for backward is kept for all microbatches, so that
    it wants a remat policy of its own around `held`; of `first` and `last` the inputs are kept.
    """
    schedule, given = pipeline.schedule, Given(ends, by_chunk(layers, pipeline), inputs)
    pipeline = replace(pipeline, first=jax.checkpoint(pipeline.first), last=jax.checkpoint(pipeline.last))

    def tick(carry: tuple[Array, Array], number: Array, *, is_full: bool) -> tuple[tuple[Array, Array], None]:
        arriving, total = carry
        x = entered(pipeline, given, arriving, schedule.forward(within(number, schedule)))
        x, _ = through(pipeline, given, x, pipeline.forward_unit(number))
        if is_full:
            total += loss_of(pipeline, given, x, number)
        return (hand_on(pipeline, x), total), None

    carry = (no_stream(pipeline, given), jnp.zeros(()))
    for is_full, start, stop in ((False, 0, schedule.warm_up), (True, schedule.warm_up, schedule.ticks)):
        carry, _ = lax.scan(partial(tick, is_full=is_full), carry, jnp.arange(start, stop))
    return carry[1] / schedule.microbatches


def held(layer: Callable[[Tree, Array], Array]) -> Callable[[Tree, Array], Array]:
    """A layer that does nothing with its weights before its input is there; to stand inside a remat policy.

    Else what depends on weights alone, as gathered weights, is the same in every tick, and JAX makes it of all layers
    at once before the first (JAX 0.10.2).
    """
    return lambda weights, x: layer(*lax.optimization_barrier((weights, x)))


def within(index: Array, schedule: Schedule) -> Array:
    """The index of a unit, or the nearest one to an index of none."""
    return jnp.clip(index, 0, schedule.units - 1)


def entered(pipeline: Pipeline, given: Given, arriving: Array, begun: Unit) -> Array:
    """What each stage works on, [p, ...]: what arrived, but what a microbatch starts as where one begins.

    begun: the unit of the first stage.
    """

    def first() -> Array:
        return pipeline.first(given.ends, pick(given.inputs, begun.microbatch))

    def nothing() -> Array:
        return jnp.zeros(arriving.shape[1:], arriving.dtype, out_sharding=P(*jax.typeof(arriving).sharding.spec[1:]))

    is_always = pipeline.schedule.virtual_stages == 1
    x = first() if is_always else lax.cond(begun.chunk == 0, first, nothing)
    return jnp.where(beside((pipeline.stages == 0) & (begun.chunk == 0), arriving), x[None], arriving)


def through(pipeline: Pipeline, given: Given, x: Array, unit: Unit) -> tuple[Array, Array]:
    """What each stage's chunk of layers makes of x [p, ...], and the inputs of its layers [c, p, ...]."""

    def step(x: Array, layer: tuple[Tree, Array]) -> tuple[Array, Array]:
        weights, is_layer = layer
        return jnp.where(beside(is_layer, x), jax.vmap(pipeline.layer)(weights, x), x), x

    return lax.scan(step, x, (chunk(given, unit, pipeline), layers_there(pipeline, unit)))


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
    return jax.shard_map(lambda x: lax.ppermute(x, AXIS, pairs), in_specs=spec, out_specs=spec)(x)


def from_stage(pipeline: Pipeline, x: Array, stage: int) -> Array:
    """What one stage has of x [p, ...], on all of them."""
    # One term alone is no zero: `jnp.sum` would have it travel as float32.
    return lax.reduce_sum(jnp.where(beside(pipeline.stages == stage, x), x, 0), (0,))


def no_stream(pipeline: Pipeline, given: Given) -> Array:
    """Zeros [p, ...] like the stream of a microbatch on every stage."""
    like = jax.eval_shape(pipeline.first, given.ends, pick(given.inputs, 0))
    spec = P(AXIS, *like.sharding.spec)
    return jnp.zeros((pipeline.schedule.stages, *like.shape), like.dtype, out_sharding=spec)


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


def layers_there(pipeline: Pipeline, unit: Unit) -> Array:
    """Which slots of each stage's chunk have a layer, [c, p]."""
    counts, stages = pipeline.counts, pipeline.schedule.stages
    least = min(counts)
    # The longer chunks, by one layer, are the first.
    count = least + (unit.chunk * stages + pipeline.stages < sum(counts) - least * len(counts))
    return jnp.arange(max(counts))[:, None] < count[None]


def pick(inputs: Tree, microbatch: Array | int) -> Tree:
    """The arrays of one microbatch."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), inputs)


def beside(flags: Array, x: Array) -> Array:
    """Flags [p] as an array that goes with x [p, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))
