"""The inputs of layers that wait for their backward in 1F1B: as many microbatches on every device, as many as stages.

In lockstep stage s keeps what it made for 2 (p - 1 - s) + 1 ticks, the first stage almost twice p, the last one tick.
So each early stage has a late one for a partner, as in BPipe (Kim et al., Memory-Balanced Pipeline Parallelism for
Training Large Language Models, ICML 2023): s and p - 1 - s keep 2 p together, and each p. What an early stage made goes
to its partner at once, comes home after p - 1 - 2 s ticks, and stays for the p until its backward. A late stage keeps
its own and as many guests as make p. All of it is one permute a tick, of the inputs of a chunk's layers: early stages
send what they just made, late ones the guest that has been there longest, and who arrives takes its slot. Beside the
stream and its gradient, which go from stage to stage, that is a layer's input for each layer; nothing waits for it in
the tick in which it travels, but over a slow network it may take longer than a tick.

With virtual stages nothing is lent, and a device keeps what `Schedule.kept` says.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.cost.pipeline import Schedule, Unit
from meshwright.runtime.pipeline import Pipeline
from meshwright.runtime.shards import STAGES


class Kept(NamedTuple):
    """What waits for its backward.

    slots: the inputs of layers, [slots, c, p, ...]. coming: those on their way between partners, [c, p, ...]; None
    where nothing is lent. place: the slot of each stage that waits for them, [p].
    """

    slots: Array
    coming: Array | None
    place: Array


class Places(NamedTuple):
    """Slots of each stage in a tick, [p]: of what it makes, of what it sends its partner, of what it works on.

    What an early stage makes stands where its partner's will stand, and is what it sends.
    """

    own: Array
    lent: Array
    due: Array


def places_in(pipeline: Pipeline, tick: Array, unit: Unit) -> Places:
    """The slots in a tick in which each stage goes backward with `unit` [p]."""
    schedule, stages = pipeline.schedule, pipeline.stages
    if not schedule.is_balanced:
        own = jnp.broadcast_to(tick % schedule.kept, stages.shape, out_sharding=P(STAGES))
        return Places(own, own, (tick - schedule.age(stages, unit.chunk)) % schedule.kept)
    p, life = schedule.stages, schedule.age(stages, 0) + 1
    is_late, ticks_here = life < p, jnp.minimum(life, p)
    own = tick % ticks_here
    # Of as many slots as ticks, the oldest is the one that is next.
    return Places(own, jnp.where(is_late, life + tick % jnp.maximum(p - life, 1), own), (tick + 1) % ticks_here)


def nothing_kept(pipeline: Pipeline, stream: Array) -> Kept:
    """Zeros, where a stream is [p, ...]."""
    schedule, spec = pipeline.schedule, jax.typeof(stream).sharding.spec
    layers = (max(pipeline.counts), *stream.shape)
    slots = jnp.zeros((schedule.kept, *layers), stream.dtype, out_sharding=P(None, None, *spec))
    coming = jnp.zeros(layers, stream.dtype, out_sharding=P(None, *spec)) if schedule.is_balanced else None
    return Kept(slots, coming, jnp.zeros_like(pipeline.stages))


def keep(kept: Kept, passed: Array, places: Places, schedule: Schedule) -> Kept:
    """With the inputs of layers [c, p, ...] that a tick made; partners send each other what is to be sent.

    What arrives is put away in the next tick: so it travels beside the work of this one, and slots are all written
    before one is read, or XLA would copy them.
    """
    kept = settled(kept)
    slots = _put(kept.slots, passed, places.own)
    if kept.coming is None:
        return kept._replace(slots=slots)
    pairs = [(stage, schedule.stages - 1 - stage) for stage in range(schedule.stages)]
    spec = jax.typeof(passed).sharding.spec
    send = jax.shard_map(lambda x: lax.ppermute(x, STAGES, pairs), in_specs=spec, out_specs=spec)
    return Kept(slots, send(taken(slots, places.lent)), places.lent)


def settled(kept: Kept) -> Kept:
    """With what was on its way in its slot."""
    return kept if kept.coming is None else kept._replace(slots=_put(kept.slots, kept.coming, kept.place))


def _put(slots: Array, passed: Array, place: Array) -> Array:
    """Slots with the inputs of layers [c, p, ...] in one of each stage."""
    spec = jax.typeof(slots).sharding.spec
    return jax.shard_map(
        lambda slots, passed, place: lax.dynamic_update_index_in_dim(slots, passed, place[0], 0),
        in_specs=(spec, P(*spec[1:]), P(STAGES)),
        out_specs=spec,
    )(slots, passed, place)


def taken(slots: Array, place: Array) -> Array:
    """The inputs of layers in one slot of each stage, [c, p, ...]."""
    spec = jax.typeof(slots).sharding.spec
    return jax.shard_map(
        lambda slots, place: lax.dynamic_index_in_dim(slots, place[0], keepdims=False),
        in_specs=(spec, P(STAGES)),
        out_specs=P(*spec[1:]),
    )(slots, place)
