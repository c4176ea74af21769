"""1F1B in lockstep: in each tick every stage runs one microbatch forward and an earlier one backward.

Values sent after one half of a tick are in transit during the other half. The inputs of layers are saved from a
microbatch's forward to its backward; everything else is recomputed. Stages store inputs for each other (`bpipe`), so
that no device holds those of more than p microbatches. A step takes as long as 1F1B with stages that alternate between
forward and backward (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.description.step.passes.schedule import Unit
from meshwright.execution.runtime.arrays import widest
from meshwright.execution.runtime.pipeline.bpipe import (
    SavedInputs,
    read_slot,
    save_inputs,
    slots_in_tick,
    store_in_flight,
    zero_saved,
)
from meshwright.execution.runtime.pipeline.gpipe import pipelined_loss
from meshwright.execution.runtime.pipeline.stages import (
    Layer,
    Pipeline,
    PipelineData,
    Sums,
    Tree,
    active_slots,
    add_chunk,
    broadcast_flags,
    by_chunk,
    chunk,
    clip_unit,
    cycle_numbers,
    flatten_slots,
    inject,
    is_unit,
    last_stage_loss,
    mean_loss,
    send_to_next,
    stage_forward,
    stage_inputs,
    where_active,
    zero_stream,
    zero_sums,
)


class State(NamedTuple):
    """The state between ticks.

    arriving: the input of each stage, from the previous stage [p, ...]. returning: the gradient of each stage's output,
    from the next stage [p, ...]. saved: layer inputs that backward will read. of_ends, of_layers: accumulated
    gradients of the parameters. sums: accumulated losses and stats.
    """

    arriving: Array
    returning: Array
    saved: SavedInputs
    of_ends: Tree
    of_layers: Tree
    sums: Sums


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pipelined_loss_1f1b(
    pipeline: Pipeline, ends: Tree, layers: tuple[Tree, ...], inputs: Tree
) -> tuple[Array, tuple[Array, Tree]]:
    """Return what `gpipe.pipelined_loss` does, with gradients from alternating forward and backward passes."""
    return pipelined_loss(pipeline, ends, layers, inputs)


def _forward(
    pipeline: Pipeline, ends: Tree, layers: tuple[Tree, ...], inputs: Tree
) -> tuple[tuple[Array, tuple[Array, Tree]], tuple[Tree, Tree]]:
    """Return the result of `pipelined_loss`, and the gradients of the loss as residuals for backward."""
    schedule, data = pipeline.schedule, PipelineData(ends, by_chunk(layers, pipeline), inputs)

    def tick(state: State, number: Array, *, is_forward: bool, is_backward: bool) -> tuple[State, None]:
        work, loss_gradient = _backward_work(pipeline, number), None
        slots = slots_in_tick(pipeline, number, work.unit)
        if is_forward:
            x = inject(pipeline, data, state.arriving, schedule.forward(clip_unit(number, schedule)))
            x, layer_inputs, sums = stage_forward(pipeline, data, x, pipeline.stage_work(number), state.sums)
            state = state._replace(sums=sums, saved=save_inputs(state.saved, layer_inputs, slots, schedule))
            if is_backward:
                state, loss_gradient = _last_stage_gradient(pipeline, data, state, x, number)
            state = state._replace(arriving=send_to_next(pipeline, x))
        if is_backward:
            state = _stage_backward(pipeline, data, state, read_slot(state.saved.slots, slots.due), loss_gradient, work)
        return state, None

    stream = zero_stream(pipeline, data)
    of_ends, of_layers = jax.tree.map(jnp.zeros_like, (data.ends, data.weights))
    state = State(stream, stream, zero_saved(pipeline, stream), of_ends, of_layers, zero_sums(pipeline, data))
    for start, stop in ((0, schedule.warm_up), (schedule.warm_up, schedule.ticks)):
        step = partial(tick, is_forward=True, is_backward=start == schedule.warm_up)
        state, _ = lax.scan(step, state, jnp.arange(start, stop))
    # Only forward ticks store what has arrived.
    state = state._replace(saved=store_in_flight(state.saved))
    with jax.named_scope("gradients"):
        step = partial(tick, is_forward=False, is_backward=True)
        state, _ = lax.scan(step, state, jnp.arange(schedule.ticks, schedule.warm_up + schedule.ticks))
        of_layers = jax.tree.map(flatten_slots, state.of_layers)
    return mean_loss(pipeline, state.sums), (state.of_ends, of_layers)


def _backward(pipeline: Pipeline, gradients: tuple[Tree, Tree], scale: tuple[Array, Tree]) -> tuple[Tree, Tree, None]:
    loss_scale, _ = scale

    def scaled(g: Array) -> Any:
        if not jnp.issubdtype(g.dtype, jnp.floating):
            return np.zeros(g.shape, jax.dtypes.float0)
        return (g.astype(widest(g.dtype, loss_scale.dtype)) * loss_scale).astype(g.dtype)

    of_ends, of_layers = jax.tree.map(scaled, gradients)
    return of_ends, of_layers, None


pipelined_loss_1f1b.defvjp(_forward, _backward)


def _last_stage_gradient(
    pipeline: Pipeline, data: PipelineData, state: State, x: Array, tick: Array
) -> tuple[State, Array]:
    """Add the loss of the microbatch that finishes in a tick, and its gradients for the ends of `data`, to the state.

    Returns the state, and the gradient of loss / m with respect to x, the output of each stage [p, ...], of which the
    last stage's is read.
    """
    loss, pull = jax.vjp(lambda ends, x: last_stage_loss(pipeline, data._replace(ends=ends), x, tick), data.ends, x)
    of_ends, of_x = pull(jnp.full_like(loss, 1 / pipeline.schedule.microbatches))
    sums = state.sums._replace(loss=state.sums.loss + loss)
    with jax.named_scope("gradients"):
        return state._replace(of_ends=_sum(state.of_ends, of_ends), sums=sums), of_x


class BackwardWork(NamedTuple):
    """The backward work of each stage in a tick, [p] each.

    unit: the unit that the stage runs. is_active: whether it runs one; if not, `unit` is arbitrary. starts_at_loss:
    whether the unit has the model's last layers, so that its gradient comes from the loss. first_stage_unit: the unit
    of the first stage, a scalar.
    """

    unit: Unit
    is_active: Array
    starts_at_loss: Array
    first_stage_unit: Unit


def _backward_work(pipeline: Pipeline, tick: Array) -> BackwardWork:
    schedule, stages = pipeline.schedule, pipeline.stages
    index = tick - schedule.warm_up - (schedule.stages - 1 - stages)
    unit = schedule.backward(clip_unit(index, schedule))
    is_end = (stages == schedule.stages - 1) & (unit.chunk == schedule.virtual_stages - 1)
    begun = schedule.backward(clip_unit(tick - schedule.warm_up - schedule.stages + 1, schedule))
    return BackwardWork(unit, is_unit(index, schedule), is_end, begun)


def _stage_backward(
    pipeline: Pipeline,
    data: PipelineData,
    state: State,
    layer_inputs: tuple[Array, ...],
    loss_gradient: Array | None,
    work: BackwardWork,
) -> State:
    """Run one unit backward on each stage; return the state with the gradients.

    Args:
      layer_inputs: saved inputs of the unit's layers, for each layer of a cycle [c, p, ...].
      loss_gradient: gradient of the loss with respect to the stages' outputs [p, ...]; None in ticks without a loss.
      work: the unit that each stage runs.
    """
    gradient = (
        state.returning
        if loss_gradient is None
        else jnp.where(broadcast_flags(work.starts_at_loss, loss_gradient), loss_gradient, state.returning)
    )
    gradient = jnp.where(broadcast_flags(work.is_active, gradient), gradient, 0)
    gradient, of_chunk = _layers_backward(pipeline, data, layer_inputs, gradient, work)
    _, pull = jax.vjp(
        lambda ends, x: inject(pipeline, data._replace(ends=ends), x, work.first_stage_unit), data.ends, state.arriving
    )
    of_ends, of_arrived = pull(gradient)
    (returning,) = jax.linear_transpose(partial(send_to_next, pipeline), state.arriving)(of_arrived)
    # JAX's transposition does not mark these ops as backward, so a named scope does (`hlo.phases`).
    with jax.named_scope("gradients"):
        return state._replace(
            returning=returning,
            of_ends=_sum(state.of_ends, of_ends),
            of_layers=add_chunk(state.of_layers, of_chunk, work.unit, pipeline),
        )


def _layers_backward(
    pipeline: Pipeline, data: PipelineData, layer_inputs: tuple[Array, ...], gradient: Array, work: BackwardWork
) -> tuple[Array, tuple[Tree, ...]]:
    """Return the gradients of each stage's input [p, ...], and of the parameters of its chunk's layers [c, p, ...].

    layer_inputs: as in `_stage_backward`. gradient: gradient of each stage's output [p, ...].
    """
    ours, share = stage_inputs(data, work.unit), 1 / pipeline.schedule.microbatches

    def made(layer: Layer, number: Array, weights: Tree, x: Array) -> tuple[Array, Array | None]:
        found = jax.vmap(layer)(weights, x, ours, number)
        return found.x, found.loss

    def step(
        gradient: Array, item: tuple[tuple[Tree, ...], tuple[Array, ...], Array | None, Array]
    ) -> tuple[Array, tuple[Tree, ...]]:
        weights, inputs, is_cycle, number = item
        is_there = work.is_active if is_cycle is None else work.is_active & is_cycle
        of_x, of_weights = where_active(is_cycle, gradient, jnp.zeros_like(gradient)), list[Tree]()
        for layer, own, x in reversed(list(zip(pipeline.layers, weights, inputs, strict=True))):
            (_, loss), pull = jax.vjp(partial(made, layer, number), own, x)
            of_loss = None if loss is None else jnp.where(is_there, share, jnp.zeros_like(loss))
            of_own, of_x = pull((of_x, of_loss))
            of_weights.insert(0, of_own)
        # The integers of quantised weights have no gradients; sums over microbatches have zeros for them.
        found = jax.tree.map(
            lambda own, g: jnp.zeros_like(own) if g.dtype == jax.dtypes.float0 else g, weights, tuple(of_weights)
        )
        return where_active(is_cycle, of_x, gradient), found

    there, numbers = active_slots(pipeline, work.unit), cycle_numbers(pipeline, work.unit)
    items = (chunk(data, work.unit, pipeline), layer_inputs, there, numbers)
    return lax.scan(step, gradient, items, reverse=True)


def _sum(left: Tree, right: Tree) -> Tree:
    return jax.tree.map(jnp.add, left, right)
