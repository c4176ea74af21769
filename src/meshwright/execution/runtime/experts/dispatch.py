"""Dispatch of tokens to experts over the devices of ep and tp, and the combination of the results.

It runs inside `jax.shard_map`. Experts are sharded over ep, and the width of each expert over tp (GShard,
arXiv:2006.16668). The devices of tp hold different tokens. If experts are sharded over ep, each device exchanges its
own tokens over ep, and the received rows are gathered over tp. If not, tokens are gathered over tp before they are
copied for each of their experts, which transfers fewer bytes.

A token has a copy for each expert that it chose. Dropless dispatch processes every copy, and a device has buffers for
the maximum that could arrive. With a capacity, each device sends each expert a fixed number of slots, with zeros in
unused slots. Copies beyond the capacity are dropped; those for later choices are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.model import Experts
from meshwright.execution.runtime.experts.all_to_all import (
    A2AShape,
    Axes,
    all_to_all,
    exchange_counts,
    padded_all_to_all,
    ragged_all_to_all,
    ragged_all_to_all_back,
)
from meshwright.execution.runtime.experts.permutation import group_by_expert, pad_groups, permute, sort_copies
from meshwright.execution.runtime.experts.routing import Choice

Keep = Callable[[Array], Array]
"""A function that gives values received from other devices a checkpoint name, so that a remat policy can save them."""


class Dispatched(NamedTuple):
    """The rows that a device's experts process, and the function that combines their results.

    Attributes:
        rows: dropless: [m, d], sorted by expert, undefined after the first sum(sizes); with a capacity: [experts,
            slots, d].
        shares: router weight of each row, shaped as `rows` with d = 1.
        sizes: number of rows of each of this device's experts [experts]; None with a capacity.
        dropped: number of dropped copies of this device's tokens for each expert [all experts].
        combine: converts the experts' outputs, shaped as `rows` and still partial sums over tp, to the output of each
            token [b, s, d].
    """

    rows: Array
    shares: Array
    sizes: Array | None
    dropped: Array
    combine: Callable[[Array], Array]


@dataclass(frozen=True)
class ExpertAxes:
    """The mesh axes of degree above 1 that shard the experts, the width of each expert, and the tokens.

    tokens: which of the axes `width` shard tokens: all of them if their devices hold different tokens, else ().
    """

    experts: Axes
    width: Axes
    tokens: Axes


def dispatch_combine(
    x: Array, routing: Choice, experts: Experts, axes: ExpertAxes, keep: Keep, *, is_partial: bool = False
) -> Dispatched:
    """Dispatch this device's tokens x [b, s, d] to the experts chosen by `routing` [b, s, choices].

    Args:
      routing: experts of each token, and the weight of each of them.
      experts: number of experts, choices per token, capacity.
      axes: mesh axes that shard experts and tokens.
      keep: gives received values a checkpoint name.
      is_partial: leave the combined output unreduced over the axes of width; only where these do not shard tokens.
    """
    dispatch = _dispatch_dropless if experts.capacity_factor is None else _dispatch_with_capacity
    first, after = ((), axes.tokens) if axes.experts else (axes.tokens, ())
    x, chosen, shares = (keep(gather(part, first, dim=1)) for part in (x, *routing))
    choices = Choice(*(part.reshape(-1, experts.num_active) for part in (chosen, shares)))
    found = dispatch(x.reshape(-1, x.shape[-1]), choices, experts, axes.experts, after, keep)

    def combine(y: Array) -> Array:
        """Return the output for each token, summed over the devices that shard each expert's width."""
        added = scatter(found.combine(y).reshape(x.shape), first, dim=1)
        if is_partial:
            return jax.lax.pcast(added, axes.width, to="unreduced") if axes.width else added
        return jax.lax.psum(added, axes.width) if axes.width and not axes.tokens else added

    # Devices that gathered each other's tokens all count the same copies.
    alike = jax.lax.axis_size(first) if first else 1
    return found._replace(dropped=found.dropped / alike, combine=combine)


def _dispatch_dropless(x: Array, routing: Choice, experts: Experts, ep: Axes, tp: Axes, keep: Keep) -> Dispatched:
    t, d = x.shape
    copies = sort_copies(routing.chosen, experts.num_stored)
    tokens, own = copies.sorted_by_expert(t)
    rows, shares = permute(x, tokens), permute(routing.shares.T.reshape(-1, 1), own)
    none = jnp.zeros_like(copies.counts, dtype=jnp.float32)
    if not ep:
        return Dispatched(rows, shares, copies.counts, none, lambda y: permute(y, tokens.inverse))
    shape = A2AShape(ep, rows.shape[0], experts.max_copies(t, jax.lax.axis_size(ep)))
    splits, received = exchange_counts(copies.counts, ep)
    splits, received = jax.tree.map(keep, (splits, gather(received, tp)))
    permutation = group_by_expert(received, capacity=shape.capacity)

    def receive(sent: Array) -> Array:
        """Return received rows, gathered over tp and sorted by this device's experts."""
        return keep(permute(gather(sent, tp).reshape(-1, sent.shape[2]), permutation))

    def combine(y: Array) -> Array:
        """Send results back to their tokens' devices and sum them for each token."""
        returned = scatter(permute(y, permutation.inverse).reshape(-1, shape.capacity, d), tp)
        return permute(ragged_all_to_all_back(returned, splits, shape), tokens.inverse)

    here = receive(ragged_all_to_all(rows, splits, shape)), receive(padded_all_to_all(shares, splits, shape))
    return Dispatched(*here, jnp.sum(received, axis=0), none, combine)


def _dispatch_with_capacity(x: Array, routing: Choice, experts: Experts, ep: Axes, tp: Axes, keep: Keep) -> Dispatched:
    t, d = x.shape
    slots = experts.slots(t)
    copies = sort_copies(routing.chosen, experts.num_stored)
    tokens, own = copies.then(pad_groups(copies.counts, capacity=slots, num_rows=copies.order.shape[0]), t)
    here = experts.num_stored // (jax.lax.axis_size(ep) if ep else 1)

    def receive(rows: Array) -> Array:
        """Exchange slots over ep; return [this device's experts, slots of all sources, d]."""
        arrived = gather(all_to_all(rows.reshape(experts.num_stored, slots, -1), ep), tp)
        by_source = arrived.reshape(-1, here, slots, rows.shape[1])
        return keep(jnp.swapaxes(by_source, 0, 1).reshape(here, -1, rows.shape[1]))

    def combine(y: Array) -> Array:
        """Send results back to their tokens' devices and sum them for each token."""
        by_source = jnp.swapaxes(y.reshape(here, -1, slots, d), 0, 1).reshape(-1, slots, d)
        return permute(all_to_all(scatter(by_source, tp), ep).reshape(-1, d), tokens.inverse, has_gaps=True)

    rows, shares = (
        permute(array, each, has_gaps=True) for array, each in ((x, tokens), (routing.shares.T.reshape(-1, 1), own))
    )
    dropped = jnp.maximum(copies.counts - slots, 0).astype(jnp.float32)
    return Dispatched(receive(rows), receive(shares), None, dropped, combine)


def gather(x: Array, axes: Axes, *, dim: int = 0) -> Array:
    """Return x all-gathered over mesh axes along `dim`; x itself if there are no axes."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def scatter(x: Array, axes: Axes, *, dim: int = 0) -> Array:
    """Return x reduce-scattered over mesh axes along `dim`; x itself if there are no axes."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
