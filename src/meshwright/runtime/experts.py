"""Tokens brought to the experts that work on them, over the devices of ep and tp, and what comes of them brought back.

To be called inside `jax.shard_map`. Experts are split over ep and the width of each over tp (GShard, arXiv:2006.16668).
The devices of tp have other tokens each: where experts are split too, each exchanges its own over ep, and what arrives
is gathered over tp; where they are not, tokens are gathered over tp before copies are made of them, which is less.

Dropless: every copy is worked on, and a device has room for all that could come. With a capacity each device sends each
expert as many copies as there are slots, empty ones as zeros; copies beyond, later choices first, are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.runtime.experts_exchange import Axes, Trip, agree, bring, send, send_padded, swap
from meshwright.runtime.experts_routing import Routing
from meshwright.runtime.experts_rows import by_expert, in_order, sort_copies, spread, take
from meshwright.workload import Experts

Keep = Callable[[Array], Array]
"""Names what came from other devices, so that a remat policy can keep it."""


class Visit(NamedTuple):
    """The rows that the experts of a device work on, the share of each in its token's result, and the way back.

    Dropless rows are [m, d], sorted by expert, `sizes` [experts] of them for each, those beyond undefined; with a
    capacity [experts, slots, d], and `sizes` is None. shares: as rows, with d = 1. dropped [experts]: the copies that
    had no slot, of this device's own tokens. back: what the experts made of the rows, still to be summed over tp, to
    what it adds to the tokens that the visit began with.
    """

    rows: Array
    shares: Array
    sizes: Array | None
    dropped: Array
    back: Callable[[Array], Array]


@dataclass(frozen=True)
class Split:
    """The axes of more than one device that split experts, the width of each, and of those the tokens too.

    tokens: all of `width`, or none where each device of them has the same tokens.
    """

    experts: Axes
    width: Axes
    tokens: Axes


def visit(x: Array, routing: Routing, experts: Experts, split: Split, keep: Keep) -> Visit:
    """The visit of this device's tokens x [b, s, d] to the experts that `routing` [b, s, choices] chose."""
    go = _go_dropless if experts.capacity_factor is None else _go_in_slots
    first, after = ((), split.tokens) if split.experts else (split.tokens, ())
    x, chosen, shares = (keep(gather(part, first, dim=1)) for part in (x, *routing))
    choices = Routing(*(part.reshape(-1, experts.num_active) for part in (chosen, shares)))
    found = go(x.reshape(-1, x.shape[-1]), choices, experts, split.experts, after, keep)

    def back(y: Array) -> Array:
        """What is added to the tokens, summed over the devices that have parts of every expert."""
        added = scatter(found.back(y).reshape(x.shape), first, dim=1)
        return jax.lax.psum(added, split.width) if split.width and not split.tokens else added

    # Devices that gathered each other's tokens count the same copies.
    alike = jax.lax.axis_size(first) if first else 1
    return found._replace(dropped=found.dropped / alike, back=back)


def _go_dropless(x: Array, routing: Routing, experts: Experts, ep: Axes, tp: Axes, keep: Keep) -> Visit:
    """A visit on which every copy is worked on."""
    t, d = x.shape
    copies = sort_copies(routing.chosen, experts.count)
    tokens, own = copies.places(in_order(copies.order.shape[0]), t)
    rows, shares = take(x, tokens), take(routing.shares.T.reshape(-1, 1), own)
    none = jnp.zeros_like(copies.counts, dtype=jnp.float32)
    if not ep:
        return Visit(rows, shares, copies.counts, none, lambda y: take(y, tokens.reversed))
    trip = Trip(ep, rows.shape[0], experts.room(t, jax.lax.axis_size(ep)))
    parcels, received = agree(copies.counts, ep)
    parcels, received = jax.tree.map(keep, (parcels, gather(received, tp)))
    places = by_expert(received, room=trip.room)

    def arrive(sent: Array) -> Array:
        """Rows as the experts here read them."""
        return keep(take(gather(sent, tp).reshape(-1, sent.shape[2]), places))

    def back(y: Array) -> Array:
        """The other way, and summed for each token."""
        returned = scatter(take(y, places.reversed).reshape(-1, trip.room, d), tp)
        return take(bring(returned, parcels, trip), tokens.reversed)

    here = arrive(send(rows, parcels, trip)), arrive(send_padded(shares, parcels, trip))
    return Visit(*here, jnp.sum(received, axis=0), none, back)


def _go_in_slots(x: Array, routing: Routing, experts: Experts, ep: Axes, tp: Axes, keep: Keep) -> Visit:
    """A visit in slots of a fixed number."""
    t, d = x.shape
    slots = experts.slots(t)
    copies = sort_copies(routing.chosen, experts.count)
    tokens, own = copies.places(spread(copies.counts, room=slots, num_rows=copies.order.shape[0]), t)
    here = experts.count // (jax.lax.axis_size(ep) if ep else 1)

    def arrive(rows: Array) -> Array:
        """Slots as the experts here read them: from each source as many."""
        arrived = gather(swap(rows.reshape(experts.count, slots, -1), ep), tp)
        by_source = arrived.reshape(-1, here, slots, rows.shape[1])
        return keep(jnp.swapaxes(by_source, 0, 1).reshape(here, -1, rows.shape[1]))

    def back(y: Array) -> Array:
        """The other way, and summed for each token."""
        by_source = jnp.swapaxes(y.reshape(here, -1, slots, d), 0, 1).reshape(-1, slots, d)
        return take(swap(scatter(by_source, tp), ep).reshape(-1, d), tokens.reversed)

    rows, shares = take(x, tokens), take(routing.shares.T.reshape(-1, 1), own)
    dropped = jnp.maximum(copies.counts - slots, 0).astype(jnp.float32)
    return Visit(arrive(rows), arrive(shares), None, dropped, back)


def gather(x: Array, axes: Axes, *, dim: int = 0) -> Array:
    """The parts of all devices along axes, one after the other."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def scatter(x: Array, axes: Axes, *, dim: int = 0) -> Array:
    """This device's part of the sum over axes."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
