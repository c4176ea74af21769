"""Rows on their way to experts: sorted by expert, spread over places of a fixed number, and back again.

Every step is a choice of rows by number, known in both directions. So backward chooses rows too, and scatters none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Places(NamedTuple):
    """Where each place has its row from, [places, 1], and the places each row goes to, [rows, uses]; -1 is nowhere."""

    sources: Array
    uses: Array

    @property
    def reversed(self) -> Places:
        """The way back, on which a row is the sum of what comes from its places."""
        return Places(self.uses, self.sources)


@jax.custom_vjp
def take(values: Array, places: Places) -> Array:
    """Rows [m, d], each the sum of those rows of `values` [n, d] that `places.sources` [m, a] names; zeros for none."""
    rows = jnp.where((places.sources >= 0)[..., None], values[places.sources], 0)
    return jnp.sum(rows, axis=1)


def _take(values: Array, places: Places) -> tuple[Array, Places]:
    """What `take` returns, and what backward needs."""
    return take(values, places), places


def _take_back(places: Places, gradient: Array) -> tuple[Array, None]:
    """The gradient of the values: the way back is the transpose of the way there."""
    return take(gradient, places.reversed), None


take.defvjp(_take, _take_back)


class Copies(NamedTuple):
    """The copies of tokens, one for each expert chosen: [choices, tokens] of them, first choices first.

    order: the copy that stands at each place when they are sorted by expert. place: where each stands. counts: how many
    each expert has.
    """

    order: Array
    place: Array
    counts: Array

    def places(self, among: Places, num_tokens: int) -> tuple[Places, Places]:
        """Places of tokens, and of the copies themselves, where the sorted copies go on to places `among`."""
        sources, uses = among.sources[:, 0], among.uses[:, 0]
        copies = jnp.where(sources >= 0, self.order[sources], -1)
        places = uses[self.place]
        tokens = Places(jnp.where(copies >= 0, copies % num_tokens, -1)[:, None], places.reshape(-1, num_tokens).T)
        return tokens, Places(copies[:, None], places[:, None])


def sort_copies(chosen: Array, num_experts: int) -> Copies:
    """The copies of tokens that chose the experts `chosen` [tokens, choices], sorted by these; ties stay in order."""
    expert = chosen.T.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.sum(expert[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return Copies(order, jnp.argsort(order), counts)


def in_order(num_rows: int) -> Places:
    """Places that leave every row where it is."""
    rows = jnp.arange(num_rows)[:, None]
    return Places(rows, rows)


def spread(sizes: Array, *, room: int, num_rows: int) -> Places:
    """Places for rows that stand in groups of `sizes` [n] one after the other: `room` for each group, n x room in all.

    Rows of a group beyond its room have no place.
    """
    ends = jnp.cumsum(sizes)
    starts, within = ends - sizes, jnp.arange(room)
    sources = jnp.where(within < sizes[:, None], starts[:, None] + within, -1)
    rows = jnp.arange(num_rows)
    group = jnp.minimum(jnp.sum(rows[:, None] >= ends, axis=1), sizes.shape[0] - 1)
    rank = rows - starts[group]
    uses = jnp.where((rows < ends[-1]) & (rank < room), group * room + rank, -1)
    return Places(sources.reshape(-1, 1), uses[:, None])


def by_expert(counts: Array, *, room: int) -> Places:
    """Places that sort rows by expert, where each of n sources has `room` of which counts [n, experts] are filled.

    Rows that no source filled come last.
    """
    filled = jnp.cumsum(counts, axis=1)
    expert = jnp.sum(jnp.arange(room)[:, None] >= filled[:, None, :], axis=2)
    order = jnp.argsort(expert.reshape(-1), stable=True)
    return Places(order[:, None], jnp.argsort(order)[:, None])
