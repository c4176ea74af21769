"""1F1B in lockstep: in each tick every stage goes forward with one microbatch and backward with an earlier one.

What a device hands on after one half of a tick travels during the other half. The inputs of layers are kept from the
forward of a microbatch to its backward, and the rest is made again. Stages keep for each other (`pipeline_kept`), so
that no device has more than p microbatches, whatever their number. The time of a step is that of 1F1B
(arXiv:2104.04473, section 2.2), where stages take turns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.cost.pipeline import Unit
from meshwright.runtime.pipeline import (
    Given,
    Pipeline,
    Sums,
    Tree,
    add_chunk,
    beside,
    by_chunk,
    chunk,
    ended,
    entered,
    hand_on,
    in_slots,
    is_within,
    layer_numbers,
    layers_there,
    loss_of,
    no_stream,
    no_sums,
    parts,
    pipelined_loss,
    through,
    where_there,
    within,
)
from meshwright.runtime.pipeline_kept import Kept, keep, nothing_kept, places_in, settled, taken


class State(NamedTuple):
    """What goes from tick to tick.

    arriving: from the stage before, [p, ...]. returning: the gradient from the stage after. kept: what waits for its
    backward. of_ends, of_layers: gradients so far. sums: of what goes forward, so far.
    """

    arriving: Array
    returning: Array
    kept: Kept
    of_ends: Tree
    of_layers: Tree
    sums: Sums


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def alternating_loss(pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree) -> tuple[Array, Tree]:
    """`pipelined_loss`, whose gradient is computed by forward and backward passes that alternate."""
    return pipelined_loss(pipeline, ends, layers, inputs)


def _forward(
    pipeline: Pipeline, ends: Tree, layers: Tree, inputs: Tree
) -> tuple[tuple[Array, Tree], tuple[Tree, Tree]]:
    """What `pipelined_loss` returns, and the gradients of the loss, which are all that backward needs."""
    schedule, given = pipeline.schedule, Given(ends, by_chunk(layers, pipeline), inputs)

    def tick(state: State, number: Array, *, is_forward: bool, is_backward: bool) -> tuple[State, None]:
        due, turned = _due(pipeline, number), None
        places = places_in(pipeline, number, due.unit)
        if is_forward:
            x = entered(pipeline, given, state.arriving, schedule.forward(within(number, schedule)))
            x, passed, sums = through(pipeline, given, x, pipeline.turn(number), state.sums)
            state = state._replace(sums=sums, kept=keep(state.kept, passed, places, schedule))
            if is_backward:
                state, turned = _turned(pipeline, given, state, x, number)
            state = state._replace(arriving=hand_on(pipeline, x))
        if is_backward:
            state = _back(pipeline, given, state, taken(state.kept.slots, places.due), turned, due)
        return state, None

    state, ends_at = _start(pipeline, given), schedule.warm_up + schedule.ticks
    for start, stop in ((0, schedule.warm_up), (schedule.warm_up, schedule.ticks)):
        step = partial(tick, is_forward=True, is_backward=start == schedule.warm_up)
        state, _ = lax.scan(step, state, jnp.arange(start, stop))
    # Only what goes forward puts away what has arrived.
    state = state._replace(kept=settled(state.kept))
    with jax.named_scope("gradients"):
        step = partial(tick, is_forward=False, is_backward=True)
        state, _ = lax.scan(step, state, jnp.arange(schedule.ticks, ends_at))
        of_layers = jax.tree.map(in_slots, state.of_layers)
    return ended(pipeline, state.sums), (state.of_ends, of_layers)


def _backward(pipeline: Pipeline, gradients: tuple[Tree, Tree], scale: tuple[Array, Tree]) -> tuple[Tree, Tree, None]:
    """The gradients of ends and layers."""
    of_ends, of_layers = jax.tree.map(lambda g: (g * scale[0]).astype(g.dtype), gradients)
    return of_ends, of_layers, None


alternating_loss.defvjp(_forward, _backward)


def _start(pipeline: Pipeline, given: Given) -> State:
    """Zeros."""
    stream = no_stream(pipeline, given)
    of_ends, of_layers = jax.tree.map(jnp.zeros_like, (given.ends, given.weights))
    sums = no_sums(pipeline, given)
    return State(stream, stream, nothing_kept(pipeline, stream), of_ends, of_layers, sums)


def _turned(pipeline: Pipeline, given: Given, state: State, x: Array, tick: Array) -> tuple[State, Array]:
    """With the loss of the microbatch that is through; and its gradient with respect to x, the last stage's alone."""
    loss, pull = jax.vjp(lambda ends, x: loss_of(pipeline, given._replace(ends=ends), x, tick), given.ends, x)
    of_ends, of_x = pull(jnp.full_like(loss, 1 / pipeline.schedule.microbatches))
    sums = state.sums._replace(loss=state.sums.loss + loss)
    with jax.named_scope("gradients"):
        return state._replace(of_ends=_sum(state.of_ends, of_ends), sums=sums), of_x


class Due(NamedTuple):
    """What each stage goes backward with in a tick, [p] each: the unit, if it is there; and that of the first stage.

    is_end: whether the unit's gradient begins with its loss.
    """

    unit: Unit
    is_there: Array
    is_end: Array
    begun: Unit


def _due(pipeline: Pipeline, tick: Array) -> Due:
    """What each stage goes backward with in a tick."""
    schedule, stages = pipeline.schedule, pipeline.stages
    index = tick - schedule.warm_up - (schedule.stages - 1 - stages)
    unit = schedule.backward(within(index, schedule))
    is_end = (stages == schedule.stages - 1) & (unit.chunk == schedule.virtual_stages - 1)
    begun = schedule.backward(within(tick - schedule.warm_up - schedule.stages + 1, schedule))
    return Due(unit, is_within(index, schedule), is_end, begun)


def _back(pipeline: Pipeline, given: Given, state: State, passed: Array, turned: Array | None, due: Due) -> State:
    """Each stage one unit backward, whose layers had the inputs `passed` [c, p, ...].

    turned: the gradient that the last stage may begin with.
    """
    gradient = state.returning if turned is None else jnp.where(beside(due.is_end, turned), turned, state.returning)
    gradient = jnp.where(beside(due.is_there, gradient), gradient, 0)
    gradient, of_chunk = _back_through(pipeline, given, passed, gradient, due)
    _, pull = jax.vjp(
        lambda ends, x: entered(pipeline, given._replace(ends=ends), x, due.begun), given.ends, state.arriving
    )
    of_ends, of_arrived = pull(gradient)
    (returning,) = jax.linear_transpose(partial(hand_on, pipeline), state.arriving)(of_arrived)
    # A scope that says backward where no transposition does.
    with jax.named_scope("gradients"):
        return state._replace(
            returning=returning,
            of_ends=_sum(state.of_ends, of_ends),
            of_layers=add_chunk(state.of_layers, of_chunk, due.unit, pipeline),
        )


def _back_through(pipeline: Pipeline, given: Given, passed: Array, gradient: Array, due: Due) -> tuple[Array, Tree]:
    """The gradients of what each stage's unit came with [p, ...], and of the parameters of its layers [c, p, ...]."""
    ours, share = parts(given, due.unit), 1 / pipeline.schedule.microbatches

    def made(number: Array, weights: Tree, x: Array) -> tuple[Array, Array | None]:
        found = jax.vmap(pipeline.layer)(weights, x, ours, number)
        return found.x, found.loss

    def step(gradient: Array, item: tuple[Tree, Array, Array | None, Array]) -> tuple[Array, Tree]:
        weights, x, is_layer, number = item
        is_there = due.is_there if is_layer is None else due.is_there & is_layer
        (_, loss), pull = jax.vjp(partial(made, number), weights, x)
        of_loss = None if loss is None else jnp.where(is_there, share, jnp.zeros_like(loss))
        of_weights, of_x = pull((where_there(is_layer, gradient, jnp.zeros_like(gradient)), of_loss))
        return where_there(is_layer, of_x, gradient), of_weights

    there, numbers = layers_there(pipeline, due.unit), layer_numbers(pipeline, due.unit)
    items = (chunk(given, due.unit, pipeline), passed, there, numbers)
    return lax.scan(step, gradient, items, reverse=True)


def _sum(left: Tree, right: Tree) -> Tree:
    """Two trees added."""
    return jax.tree.map(jnp.add, left, right)
