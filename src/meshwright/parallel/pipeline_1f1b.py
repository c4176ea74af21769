"""1F1B in lockstep: in each tick every stage goes forward with one microbatch and backward with an earlier one.

What a device hands on after one half of a tick travels during the other half. A stage keeps the inputs of its layers
from the forward of a microbatch to its backward, and makes the rest again: 2 p - 1 microbatches at most, whatever their
number. The time of a step is that of 1F1B (arXiv:2104.04473, section 2.2), which keeps p where stages take turns.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.cost.pipeline import Number, Unit
from meshwright.parallel.pipeline import (
    Given,
    Pipeline,
    Tree,
    beside,
    by_chunk,
    chunk,
    entered,
    hand_on,
    layers_there,
    loss_of,
    no_stream,
    pipelined_loss,
    through,
    within,
)


class State(NamedTuple):
    """What goes from tick to tick.

    arriving: from the stage before, [p, ...]. returning: the gradient from the stage after. kept: the inputs of layers
    of the last ticks, [k, c, p, ...]. of_ends, of_layers: gradients so far. total: losses so far.
    """

    arriving: Array
    returning: Array
    kept: Array
    of_ends: Tree
    of_layers: Tree
    total: Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def alternating_loss(pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree) -> Array:
    """`pipelined_loss`, whose gradient is computed by forward and backward passes that alternate."""
    return pipelined_loss(pipeline, ends, layers, inputs)


def _forward(pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree) -> tuple[Array, tuple[Tree, Tree]]:
    """The loss with its gradients, which are all that backward needs."""
    schedule, given = pipeline.schedule, Given(ends, by_chunk(layers, pipeline), inputs)

    def tick(state: State, number: Array, *, is_forward: bool, is_backward: bool) -> tuple[State, None]:
        turned = None
        if is_forward:
            state, x = _ahead(pipeline, given, state, number)
            if is_backward:
                state, turned = _turned(pipeline, given, state, x, number)
            state = state._replace(arriving=hand_on(pipeline, x))
        if is_backward:
            state = _back(pipeline, given, state, turned, number)
        return state, None

    state = _start(pipeline, given)
    bounds = (0, schedule.warm_up, schedule.ticks, schedule.warm_up + schedule.ticks)
    for start, stop in pairwise(bounds):
        step = partial(tick, is_forward=start < schedule.ticks, is_backward=start >= schedule.warm_up)
        state, _ = lax.scan(step, state, jnp.arange(start, stop))
    of_layers = jax.tree.map(_stacked_like, state.of_layers, layers)
    return state.total / schedule.microbatches, (state.of_ends, of_layers)


def _backward(pipeline: Pipeline, gradients: tuple[Tree, Tree], scale: Array) -> tuple[Tree, Tree, None]:
    """The gradients of ends and layers."""
    of_ends, of_layers = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
    return of_ends, of_layers, None


alternating_loss.defvjp(_forward, _backward)


def _start(pipeline: Pipeline, given: Given) -> State:
    """Zeros."""
    stream = no_stream(pipeline, given)
    kept = jnp.zeros(
        (pipeline.schedule.kept, max(pipeline.counts), *stream.shape),
        stream.dtype,
        out_sharding=jax.P(None, None, *jax.typeof(stream).sharding.spec),
    )
    of_ends, of_layers = jax.tree.map(jnp.zeros_like, (given.ends, given.weights))
    return State(stream, stream, kept, of_ends, of_layers, jnp.zeros(()))


def _ahead(pipeline: Pipeline, given: Given, state: State, tick: Array) -> tuple[State, Array]:
    """Each stage one unit forward: with the inputs of its layers kept, and what the unit becomes."""
    schedule = pipeline.schedule
    x = entered(pipeline, given, state.arriving, schedule.forward(within(tick, schedule)))
    x, passed = through(pipeline, given, x, pipeline.forward_unit(tick))
    kept = lax.dynamic_update_index_in_dim(state.kept, passed, tick % schedule.kept, 0)
    return state._replace(kept=kept), x


def _turned(pipeline: Pipeline, given: Given, state: State, x: Array, tick: Array) -> tuple[State, Array]:
    """With the loss of the microbatch that is through; and its gradient with respect to x, the last stage's alone."""
    loss, pull = jax.vjp(lambda ends, x: loss_of(pipeline, given._replace(ends=ends), x, tick), given.ends, x)
    of_ends, of_x = pull(jnp.full_like(loss, 1 / pipeline.schedule.microbatches))
    return state._replace(of_ends=_sum(state.of_ends, of_ends), total=state.total + loss), of_x


def _back(pipeline: Pipeline, given: Given, state: State, turned: Array | None, tick: Array) -> State:
    """Each stage one unit backward; turned: the gradient that the last stage may begin with."""
    schedule, stages = pipeline.schedule, pipeline.stages
    index = tick - schedule.warm_up - (schedule.stages - 1 - stages)
    unit = schedule.backward(within(index, schedule))
    is_end = (stages == schedule.stages - 1) & (unit.chunk == schedule.virtual_stages - 1)
    gradient = state.returning if turned is None else jnp.where(beside(is_end, turned), turned, state.returning)
    gradient = jnp.where(beside((index >= 0) & (index < schedule.units), gradient), gradient, 0)
    gradient, of_chunk = _back_through(pipeline, given, state.kept, gradient, unit, tick)
    begun = schedule.backward(within(tick - schedule.warm_up - schedule.stages + 1, schedule))
    _, pull = jax.vjp(
        lambda ends, x: entered(pipeline, given._replace(ends=ends), x, begun), given.ends, state.arriving
    )
    of_ends, of_arrived = pull(gradient)
    (returning,) = jax.linear_transpose(partial(hand_on, pipeline), state.arriving)(of_arrived)
    return state._replace(
        returning=returning,
        of_ends=_sum(state.of_ends, of_ends),
        of_layers=_add_chunk(state.of_layers, of_chunk, unit, pipeline),
    )


def _back_through(
    pipeline: Pipeline, given: Given, kept: Array, gradient: Array, unit: Unit, tick: Array
) -> tuple[Array, Tree]:
    """The gradients of what each stage's unit came with [p, ...], and of the parameters of its layers [c, p, ...]."""
    slot = (tick - pipeline.schedule.age(pipeline.stages, unit.chunk)) % pipeline.schedule.kept
    passed = jax.vmap(partial(lax.dynamic_index_in_dim, keepdims=False), (2, 0), 1)(kept, slot)

    def step(gradient: Array, item: tuple[Tree, Array, Array]) -> tuple[Array, Tree]:
        weights, x, is_layer = item
        flags = beside(is_layer, x)
        _, pull = jax.vjp(jax.vmap(pipeline.layer), weights, x)
        of_weights, of_x = pull(jnp.where(flags, gradient, 0))
        return jnp.where(flags, of_x, gradient), of_weights

    items = (chunk(given, unit, pipeline), passed, layers_there(pipeline, unit))
    return lax.scan(step, gradient, items, reverse=True)


def _add_chunk(total: Tree, of_chunk: Tree, unit: Unit, pipeline: Pipeline) -> Tree:
    """Gradients [p, v, c, ...] with those of each stage's chunk, [c, p, ...], added."""

    def add(total: Array, found: Array) -> Array:
        if pipeline.schedule.virtual_stages == 1:
            return total + jnp.moveaxis(found, 0, 1)[:, None]
        return jax.vmap(_add_at)(total, jnp.moveaxis(found, 0, 1), unit.chunk)

    return jax.tree.map(add, total, of_chunk)


def _add_at(total: Array, found: Array, index: Number) -> Array:
    """The array with another added to its row at an index."""
    row = lax.dynamic_index_in_dim(total, index, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + found, index, 0)


def _stacked_like(array: Array, like: Array) -> Array:
    """An array [p, v, c, ...] as one stacked over slots."""
    return lax.reshape(array, like.shape, out_sharding=jax.typeof(like).sharding.spec)


def _sum(left: Tree, right: Tree) -> Tree:
    """Two trees added."""
    return jax.tree.map(jnp.add, left, right)
