"""Balanced storage of saved layer inputs in 1F1B: every device holds those of p microbatches, for p stages.

A layer's input is saved from its forward to its backward. In lockstep (see `stages` for ticks and dims), stage s needs
it for 2 (p - 1 - s) + 1 ticks: almost 2 p on the first stage, 1 on the last. Stages s and p - 1 - s are partners that
share the storage, as in BPipe (Kim et al., Memory-Balanced Pipeline Parallelism for Training Large Language Models,
ICML 2023), so that each holds the inputs of p microbatches.

An early stage (in the first half) sends its saved inputs to its partner at once, gets them back after p - 1 - 2 s
ticks, and holds them for the p ticks until their backward. A late stage holds its own and its partner's inputs, of p
microbatches in all. One permute per tick for each layer of a cycle, of the inputs of a chunk's layers, serves both
directions: early stages send their newest inputs, late stages return the oldest of their partner's, and received inputs
take the freed slot. Per tick, this adds one layer input per layer to the traffic between stages. No computation waits
for the permute within its tick, but over a slow network it may take longer than a tick.

With virtual stages, inputs are not exchanged: a device holds those of `Schedule.kept` ticks.
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
    """Layer inputs that backward will read.

    slots: the inputs of a chunk's layers in each slot, for each layer of a cycle [slots, c, p, ...]. in_flight: inputs
    in transit between partners, for each layer of a cycle [c, p, ...]; None without an exchange. in_flight_slot: for
    each stage, the slot to which they will be written [p].
    """

    slots: tuple[Array, ...]
    in_flight: tuple[Array, ...] | None
    in_flight_slot: Array


class Slots(NamedTuple):
    """The slots that each stage uses in a tick, [p] each.

    own: where the stage saves its inputs. to_partner: the slot whose inputs it sends to its partner. due: the slot with
    whose inputs it runs backward. An early stage sends the slot just saved, and later stores there what is returned.
    """

    own: Array
    to_partner: Array
    due: Array


def slots_in_tick(pipeline: Pipeline, tick: Array, unit: Unit) -> Slots:
    """Return the slots of each stage in a tick. unit: the unit that each stage runs backward [p]."""
    schedule, stages = pipeline.schedule, pipeline.stages
    if not schedule.is_balanced:
        own = jnp.broadcast_to(tick % schedule.kept, stages.shape, out_sharding=P(STAGES))
        return Slots(own, own, (tick - schedule.age(stages, unit.chunk)) % schedule.kept)
    p, life = schedule.stages, schedule.age(stages, 0) + 1
    is_late, ticks_here = life < p, jnp.minimum(life, p)
    own = tick % ticks_here
    # Slots are used in rotation, so the slot after the newest has the oldest inputs.
    return Slots(own, jnp.where(is_late, life + tick % jnp.maximum(p - life, 1), own), (tick + 1) % ticks_here)


def zero_saved(pipeline: Pipeline, stream: Array) -> SavedInputs:
    """Return `SavedInputs` of zeros, for layer inputs shaped like `stream` [p, ...]."""
    schedule, spec = pipeline.schedule, jax.typeof(stream).sharding.spec
    layers, count = (max(pipeline.counts), *stream.shape), len(pipeline.layers)
    slots = jnp.zeros((schedule.kept, *layers), stream.dtype, out_sharding=P(None, None, *spec))
    in_flight = jnp.zeros(layers, stream.dtype, out_sharding=P(None, *spec))
    return SavedInputs(
        (slots,) * count, (in_flight,) * count if schedule.is_balanced else None, jnp.zeros_like(pipeline.stages)
    )


def save_inputs(
    saved: SavedInputs, layer_inputs: tuple[Array, ...], tick_slots: Slots, schedule: Schedule
) -> SavedInputs:
    """Return `saved` with the layer inputs of a tick, and exchange inputs between partners.

    Received inputs are stored in the next tick, so that their transfer overlaps with this tick's work. All slots are
    written before any is read, which keeps XLA from copying the slots.
    """
    saved = store_in_flight(saved)
    slots = _write_slot(saved.slots, layer_inputs, tick_slots.own)
    if saved.in_flight is None:
        return saved._replace(slots=slots)
    pairs = [(stage, schedule.stages - 1 - stage) for stage in range(schedule.stages)]
    spec = jax.typeof(layer_inputs[0]).sharding.spec
    send = jax.shard_map(lambda x: lax.ppermute(x, STAGES, pairs), in_specs=spec, out_specs=spec)
    in_flight = tuple(send(inputs) for inputs in read_slot(slots, tick_slots.to_partner))
    return SavedInputs(slots, in_flight, tick_slots.to_partner)


def store_in_flight(saved: SavedInputs) -> SavedInputs:
    """Return `saved` with received inputs written to their slots."""
    if saved.in_flight is None:
        return saved
    return saved._replace(slots=_write_slot(saved.slots, saved.in_flight, saved.in_flight_slot))


def _write_slot(slots: tuple[Array, ...], layer_inputs: tuple[Array, ...], place: Array) -> tuple[Array, ...]:
    spec = jax.typeof(slots[0]).sharding.spec
    write = jax.shard_map(
        lambda slots, layer_inputs, place: lax.dynamic_update_index_in_dim(slots, layer_inputs, place[0], 0),
        in_specs=(spec, P(*spec[1:]), P(STAGES)),
        out_specs=spec,
    )
    return tuple(write(own, inputs, place) for own, inputs in zip(slots, layer_inputs, strict=True))


def read_slot(slots: tuple[Array, ...], place: Array) -> tuple[Array, ...]:
    """Return the layer inputs in one slot of each stage, for each layer of a cycle [c, p, ...]."""
    spec = jax.typeof(slots[0]).sharding.spec
    read = jax.shard_map(
        lambda slots, place: lax.dynamic_index_in_dim(slots, place[0], keepdims=False),
        in_specs=(spec, P(STAGES)),
        out_specs=P(*spec[1:]),
    )
    return tuple(read(own, place) for own in slots)
