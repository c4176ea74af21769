"""Rows sorted by expert, sent to the devices of a mesh axis that have these experts, and brought back.

How many a device sends another is known only as it runs, the shapes of arrays before. XLA:TPU and XLA:GPU have a ragged
all-to-all, which moves what there is; XLA:CPU has not, there each device sends each other one as many rows as it ever
could. What arrives is the same: `room` places for each source, filled from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.runtime.experts_rows import spread, take

Axes = tuple[str, ...]


class Parcels(NamedTuple):
    """What this device sends each of n others and gets from it, as [n] numbers of rows.

    starts: where the rows for each begin among those sent. their_starts: where, at each other, those for this begin.
    """

    sent: Array
    received: Array
    starts: Array
    their_starts: Array


def agree(counts: Array, axes: Axes) -> tuple[Parcels, Array]:
    """What is sent and received where each device has counts [experts] of rows for all experts, and those for its own.

    The second is [sources, own experts]. An all-to-all of a few numbers.
    """
    n = jax.lax.axis_size(axes)
    each = counts.reshape(n, -1)
    sent = jnp.sum(each, axis=1)
    starts = jnp.cumsum(sent) - sent
    theirs = swap(jnp.concatenate([each, starts[:, None]], axis=1), axes)
    received = theirs[:, :-1]
    return Parcels(sent, jnp.sum(received, axis=1), starts, theirs[:, -1]), received


def swap(x: Array, axes: Axes) -> Array:
    """x [n, ...] with part j of each device's sent to device j, by source; its own inverse."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


@dataclass(frozen=True)
class Trip:
    """The shapes of an exchange over `axes`: of `num_rows` rows on each device, at most `room` of them to one other."""

    axes: Axes
    num_rows: int
    room: int


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(rows: Array, parcels: Parcels, trip: Trip) -> Array:
    """The rows [n, room, d] that this device gets, of `rows` [num_rows, d] that stand in the order of their devices."""
    return jax.lax.platform_dependent(
        rows, parcels, cpu=partial(send_padded, trip=trip), default=partial(_send_ragged, trip=trip)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def bring(buffer: Array, parcels: Parcels, trip: Trip) -> Array:
    """The rows [num_rows, d] that were sent, from what became of them where they came to: `send` the other way."""
    return jax.lax.platform_dependent(
        buffer, parcels, cpu=partial(_bring_padded, trip=trip), default=partial(_bring_ragged, trip=trip)
    )


def send_padded(rows: Array, parcels: Parcels, trip: Trip) -> Array:
    """What `send` returns where every device sends every other `room` rows, whatever there is to send.

    On any hardware the better way for rows of one number: TPUs would pad each such row to 128.
    """
    padded = take(rows, spread(parcels.sent, room=trip.room, num_rows=trip.num_rows))
    return swap(padded.reshape(-1, trip.room, rows.shape[1]), trip.axes)


def _bring_padded(buffer: Array, parcels: Parcels, *, trip: Trip) -> Array:
    """Every device sends every other `room` rows back."""
    places = spread(parcels.sent, room=trip.room, num_rows=trip.num_rows)
    return take(swap(buffer, trip.axes).reshape(-1, buffer.shape[2]), places.reversed)


def _send_ragged(rows: Array, parcels: Parcels, *, trip: Trip) -> Array:
    """What there is to send is sent, and no more."""
    n, width = parcels.sent.shape[0], rows.shape[1]
    mine = jnp.full_like(parcels.sent, trip.room * jax.lax.axis_index(trip.axes))
    empty = jnp.zeros_like(rows, shape=(n * trip.room, width))
    arrived = jax.lax.ragged_all_to_all(
        rows, empty, parcels.starts, parcels.sent, mine, parcels.received, axis_name=trip.axes
    )
    return arrived.reshape(n, trip.room, width)


def _bring_ragged(buffer: Array, parcels: Parcels, *, trip: Trip) -> Array:
    """What came is sent back, and no more."""
    n, room, width = buffer.shape
    empty = jnp.zeros_like(buffer, shape=(trip.num_rows, width))
    starts = room * jnp.arange(n, dtype=jnp.int32)
    rows = buffer.reshape(n * room, width)
    return jax.lax.ragged_all_to_all(
        rows, empty, starts, parcels.received, parcels.their_starts, parcels.sent, axis_name=trip.axes
    )


def _send_forward(rows: Array, parcels: Parcels, trip: Trip) -> tuple[Array, Parcels]:
    """What `send` returns, and what backward needs."""
    return send(rows, parcels, trip), parcels


def _send_backward(trip: Trip, parcels: Parcels, gradient: Array) -> tuple[Array, None]:
    """Gradients of rows come back the way the rows went."""
    return bring(gradient, parcels, trip), None


def _bring_forward(buffer: Array, parcels: Parcels, trip: Trip) -> tuple[Array, Parcels]:
    """What `bring` returns, and what backward needs."""
    return bring(buffer, parcels, trip), parcels


def _bring_backward(trip: Trip, parcels: Parcels, gradient: Array) -> tuple[Array, None]:
    """Gradients of rows brought back are sent the way those rows were."""
    return send(gradient, parcels, trip), None


send.defvjp(_send_forward, _send_backward)
bring.defvjp(_bring_forward, _bring_backward)
