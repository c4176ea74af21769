"""The all-to-all of rows sorted by expert, to the devices that hold the experts and back.

The number of rows sent is known only at run time, but array shapes are static. XLA:TPU and XLA:GPU have a ragged
all-to-all, which sends only the actual rows. XLA:CPU has none, so there every device sends every other device the
largest possible number of rows. In both cases the receive buffer has `capacity` rows for each source device, and those
of a source are filled from the first on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.execution.runtime.experts.permutation import pad_groups, permute

Axes = tuple[str, ...]


class A2ASplits(NamedTuple):
    """Row counts of an all-to-all between this device and each of n devices; every field is [n].

    sent, received: number of rows that this device sends to each device, and receives from it. starts: index of the
    first row for each destination among the rows of this device. remote_starts: index of the first row for this device
    among the rows of each source.
    """

    sent: Array
    received: Array
    starts: Array
    remote_starts: Array


def exchange_counts(counts: Array, axes: Axes) -> tuple[A2ASplits, Array]:
    """Return the splits of an all-to-all, and the numbers of rows received [sources, experts of this device].

    counts: this device's number of rows for each expert [all experts]. This runs an all-to-all of a few integers.
    """
    n = jax.lax.axis_size(axes)
    each = counts.reshape(n, -1)
    sent = jnp.sum(each, axis=1)
    starts = jnp.cumsum(sent) - sent
    theirs = all_to_all(jnp.concatenate([each, starts[:, None]], axis=1), axes)
    received = theirs[:, :-1]
    return A2ASplits(sent, jnp.sum(received, axis=1), starts, theirs[:, -1]), received


def all_to_all(x: Array, axes: Axes) -> Array:
    """Send x[j] of x [n, ...] to device j; return the parts received [n, ...], by source. It is its own inverse."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


@dataclass(frozen=True)
class A2AShape:
    """Static shapes of an all-to-all of rows over `axes`.

    num_rows: number of rows on each device. capacity: largest number of rows from one device to another.
    """

    axes: Axes
    num_rows: int
    capacity: int


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ragged_all_to_all(rows: Array, splits: A2ASplits, shape: A2AShape) -> Array:
    """Send `rows` [num_rows, d], ordered by destination; returns the rows received [n, capacity, d]."""
    return jax.lax.platform_dependent(
        rows, splits, cpu=partial(padded_all_to_all, shape=shape), default=partial(_ragged, shape=shape)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ragged_all_to_all_back(buffer: Array, splits: A2ASplits, shape: A2AShape) -> Array:
    """The inverse of `ragged_all_to_all`: return received rows [n, capacity, d] to their sources, [num_rows, d]."""
    return jax.lax.platform_dependent(
        buffer, splits, cpu=partial(_padded_back, shape=shape), default=partial(_ragged_back, shape=shape)
    )


def padded_all_to_all(rows: Array, splits: A2ASplits, shape: A2AShape) -> Array:
    """Like `ragged_all_to_all`, but send `capacity` rows to every destination, padded with zeros.

    For rows of one element this is faster on all hardware: TPUs would pad each such row to 128 elements.
    """
    permutation = pad_groups(splits.sent, capacity=shape.capacity, num_rows=shape.num_rows)
    padded = permute(rows, permutation, has_gaps=True)
    return all_to_all(padded.reshape(-1, shape.capacity, rows.shape[1]), shape.axes)


def _padded_back(buffer: Array, splits: A2ASplits, *, shape: A2AShape) -> Array:
    permutation = pad_groups(splits.sent, capacity=shape.capacity, num_rows=shape.num_rows)
    received = all_to_all(buffer, shape.axes).reshape(-1, buffer.shape[2])
    return permute(received, permutation.inverse, has_gaps=True)


def _ragged(rows: Array, splits: A2ASplits, *, shape: A2AShape) -> Array:
    n, width = splits.sent.shape[0], rows.shape[1]
    mine = jnp.full_like(splits.sent, shape.capacity * jax.lax.axis_index(shape.axes))
    empty = jnp.zeros_like(rows, shape=(n * shape.capacity, width))
    arrived = jax.lax.ragged_all_to_all(
        rows, empty, splits.starts, splits.sent, mine, splits.received, axis_name=shape.axes
    )
    return arrived.reshape(n, shape.capacity, width)


def _ragged_back(buffer: Array, splits: A2ASplits, *, shape: A2AShape) -> Array:
    n, capacity, width = buffer.shape
    empty = jnp.zeros_like(buffer, shape=(shape.num_rows, width))
    starts = capacity * jnp.arange(n, dtype=jnp.int32)
    rows = buffer.reshape(n * capacity, width)
    return jax.lax.ragged_all_to_all(
        rows, empty, starts, splits.received, splits.remote_starts, splits.sent, axis_name=shape.axes
    )


def _forward(rows: Array, splits: A2ASplits, shape: A2AShape) -> tuple[Array, A2ASplits]:
    return ragged_all_to_all(rows, splits, shape), splits


def _backward(shape: A2AShape, splits: A2ASplits, gradient: Array) -> tuple[Array, None]:
    return ragged_all_to_all_back(gradient, splits, shape), None


def _back_forward(buffer: Array, splits: A2ASplits, shape: A2AShape) -> tuple[Array, A2ASplits]:
    return ragged_all_to_all_back(buffer, splits, shape), splits


def _back_backward(shape: A2AShape, splits: A2ASplits, gradient: Array) -> tuple[Array, None]:
    return ragged_all_to_all(gradient, splits, shape), None


ragged_all_to_all.defvjp(_forward, _backward)
ragged_all_to_all_back.defvjp(_back_forward, _back_backward)
