"""Balanced storage of saved layer inputs in 1F1B: every device holds as many microbatches as there are stages.

In lockstep, stage s needs its saved inputs for 2 (p - 1 - s) + 1 ticks: almost 2 p on the first stage, 1 on the last.
Pairs of stages s and p - 1 - s share the load, as in BPipe (Kim et al., Memory-Balanced Pipeline Parallelism for
Training Large Language Models, ICML 2023), so that each holds p microbatches.

An early stage sends its saved inputs to its partner at once, gets them back after p - 1 - 2 s ticks, and holds them for
the p ticks until their backward. A late stage holds its own and its partner's inputs, p microbatches in all. One
permute per tick, of the inputs of a chunk's layers, serves both directions: early stages send their newest inputs, late
stages return the oldest of their partner's, and received inputs take the freed slot. This adds one layer input per
layer to the traffic between stages. No computation waits for the permute within its tick, but over a slow network it
may take longer than a tick.

With virtual stages inputs are not exchanged: a device holds `Schedule.kept` microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.passes.schedule import Schedule, Unit
from meshwright.execution.runtime.pipeline.stages import Pipeline
from meshwright.execution.runtime.shards import STAGES


class SavedInputs(NamedTuple):
    """Layer inputs awaiting backward.

    slots: [slots, c, p, ...]. in_flight: inputs in transit between partners [c, p, ...]; None without an exchange.
    in_flight_slot: the slot of each stage that will receive them, [p].
    """

    slots: Array
    in_flight: Array | None
    in_flight_slot: Array


class Slots(NamedTuple):
    """Slots of each stage in a tick, [p]: of its own inputs, of inputs sent to its partner, of inputs to run backward.

    An early stage saves into the slot that will receive its partner's inputs, and sends the same slot.
    """

    own: Array
    to_partner: Array
    due: Array


def slots_in_tick(pipeline: Pipeline, tick: Array, unit: Unit) -> Slots:
    """Return the slots of a tick in which each stage runs `unit` [p] backward."""
    schedule, stages = pipeline.schedule, pipeline.stages
    if not schedule.is_balanced:
        own = jnp.broadcast_to(tick % schedule.kept, stages.shape, out_sharding=P(STAGES))
        return Slots(own, own, (tick - schedule.age(stages, unit.chunk)) % schedule.kept)
    p, life = schedule.stages, schedule.age(stages, 0) + 1
    is_late, ticks_here = life < p, jnp.minimum(life, p)
    own = tick % ticks_here
    # Slots are used in rotation, so the next slot is the oldest.
    return Slots(own, jnp.where(is_late, life + tick % jnp.maximum(p - life, 1), own), (tick + 1) % ticks_here)


def zero_saved(pipeline: Pipeline, stream: Array) -> SavedInputs:
    """Return empty slots for a stream [p, ...]."""
    schedule, spec = pipeline.schedule, jax.typeof(stream).sharding.spec
    layers = (max(pipeline.counts), *stream.shape)
    slots = jnp.zeros((schedule.kept, *layers), stream.dtype, out_sharding=P(None, None, *spec))
    in_flight = jnp.zeros(layers, stream.dtype, out_sharding=P(None, *spec)) if schedule.is_balanced else None
    return SavedInputs(slots, in_flight, jnp.zeros_like(pipeline.stages))


def save_inputs(saved: SavedInputs, layer_inputs: Array, tick_slots: Slots, schedule: Schedule) -> SavedInputs:
    """Save the layer inputs [c, p, ...] of a tick, and exchange inputs between partners.

    Received inputs are stored in the next tick: their transfer overlaps with this tick's work. All slots are written
    before any is read, which keeps XLA from copying them.
    """
    saved = store_in_flight(saved)
    slots = _write_slot(saved.slots, layer_inputs, tick_slots.own)
    if saved.in_flight is None:
        return saved._replace(slots=slots)
    pairs = [(stage, schedule.stages - 1 - stage) for stage in range(schedule.stages)]
    spec = jax.typeof(layer_inputs).sharding.spec
    send = jax.shard_map(lambda x: lax.ppermute(x, STAGES, pairs), in_specs=spec, out_specs=spec)
    return SavedInputs(slots, send(read_slot(slots, tick_slots.to_partner)), tick_slots.to_partner)


def store_in_flight(saved: SavedInputs) -> SavedInputs:
    """Store received inputs in their slots."""
    if saved.in_flight is None:
        return saved
    return saved._replace(slots=_write_slot(saved.slots, saved.in_flight, saved.in_flight_slot))


def _write_slot(slots: Array, layer_inputs: Array, place: Array) -> Array:
    spec = jax.typeof(slots).sharding.spec
    return jax.shard_map(
        lambda slots, layer_inputs, place: lax.dynamic_update_index_in_dim(slots, layer_inputs, place[0], 0),
        in_specs=(spec, P(*spec[1:]), P(STAGES)),
        out_specs=spec,
    )(slots, layer_inputs, place)


def read_slot(slots: Array, place: Array) -> Array:
    """Return the layer inputs in one slot of each stage, [c, p, ...]."""
    spec = jax.typeof(slots).sharding.spec
    return jax.shard_map(
        lambda slots, place: lax.dynamic_index_in_dim(slots, place[0], keepdims=False),
        in_specs=(spec, P(STAGES)),
        out_specs=P(*spec[1:]),
    )(slots, place)
