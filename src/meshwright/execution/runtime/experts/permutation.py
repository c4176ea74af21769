"""Permutations of rows for expert dispatch: sort by expert, pad groups to a fixed number of rows, and the inverses.

A permutation is stored as gather indices in both directions, so that forward and backward both gather rows and never
scatter them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Permutation(NamedTuple):
    """Gather indices of a permutation of rows, in both directions; -1 means no row.

    sources [slots, 1]: the row that each slot reads. destinations [rows, uses]: the slots that each row goes to.
    """

    sources: Array
    destinations: Array

    @property
    def inverse(self) -> Permutation:
        """The transpose: `permute` with it sums, for each row, the slots that the row went to."""
        return Permutation(self.destinations, self.sources)


def permute(values: Array, permutation: Permutation, *, has_gaps: bool = False) -> Array:
    """Return rows [m, d]: each is the sum of the rows of `values` [n, d] listed in `permutation.sources` [m, a].

    has_gaps: whether an index of the permutation may be -1. Without gaps there are fewer ops, of which each takes a TPU
    a microsecond.
    """
    rows: Any = _permute(has_gaps, values, permutation)
    return rows


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(has_gaps: bool, values: Array, permutation: Permutation) -> Array:
    sources = permutation.sources
    rows = values.at[sources].get(mode="clip", wrap_negative_indices=False)
    return jnp.sum(jnp.where((sources >= 0)[..., None], rows, 0) if has_gaps else rows, axis=1)


def _permute_forward(has_gaps: bool, values: Array, permutation: Permutation) -> tuple[Array, Permutation]:
    return _permute(has_gaps, values, permutation), permutation


def _permute_backward(has_gaps: bool, permutation: Permutation, gradient: Array) -> tuple[Array, None]:
    return _permute(has_gaps, gradient, permutation.inverse), None


_permute.defvjp(_permute_forward, _permute_backward)


class Copies(NamedTuple):
    """The copies of tokens, one for each chosen expert, sorted by expert.

    Copy c * num_tokens + t is the copy of token t for its choice c. order: the copy at each sorted position. place: the
    sorted position of each copy. counts: number of copies for each expert [experts].
    """

    order: Array
    place: Array
    counts: Array

    def sorted_by_expert(self, num_tokens: int) -> tuple[Permutation, Permutation]:
        """Return the sort by expert as a permutation of rows of tokens [num_tokens, d], and of unsorted copies."""
        return _of_tokens_and_copies(self.order, self.order % num_tokens, self.place, num_tokens)

    def then(self, permutation: Permutation, num_tokens: int) -> tuple[Permutation, Permutation]:
        """Return `sorted_by_expert`, each followed by `permutation` of the sorted copies."""
        sources, destinations = permutation.sources[:, 0], permutation.destinations[:, 0]
        copies = jnp.where(sources >= 0, self.order[sources], -1)
        tokens = jnp.where(copies >= 0, copies % num_tokens, -1)
        return _of_tokens_and_copies(copies, tokens, destinations[self.place], num_tokens)


def _of_tokens_and_copies(
    copies: Array, tokens: Array, slots: Array, num_tokens: int
) -> tuple[Permutation, Permutation]:
    """Return the permutations of tokens and of unsorted copies to slots.

    copies, tokens: those that each slot reads. slots: the slot of each copy.
    """
    return Permutation(tokens[:, None], slots.reshape(-1, num_tokens).T), Permutation(copies[:, None], slots[:, None])


def sort_copies(chosen: Array, num_experts: int) -> Copies:
    """Return the copies of tokens, stably sorted by expert; chosen: the experts of each token [tokens, choices]."""
    expert = chosen.T.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.sum(expert[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    return Copies(order, jnp.argsort(order), counts)


def pad_groups(sizes: Array, *, capacity: int, num_rows: int) -> Permutation:
    """Return the permutation from `num_rows` rows, in consecutive groups of `sizes` [n], to n * capacity slots.

    Each group gets `capacity` slots; unused slots read no row, and rows beyond the capacity have no slot.
    """
    ends = jnp.cumsum(sizes)
    starts, within = ends - sizes, jnp.arange(capacity)[None, :]
    sources = jnp.where(within < sizes[:, None], starts[:, None] + within, -1)
    rows = jnp.arange(num_rows)
    group = jnp.minimum(jnp.sum(rows[:, None] >= ends[None, :], axis=1), sizes.shape[0] - 1)
    rank = rows - starts[group]
    destinations = jnp.where((rows < ends[-1]) & (rank < capacity), group * capacity + rank, -1)
    return Permutation(sources.reshape(-1, 1), destinations[:, None])


def group_by_expert(counts: Array, *, capacity: int) -> Permutation:
    """Return the permutation that sorts received rows [n * capacity] by expert, with unfilled rows last.

    counts: for each source, the number of its rows for each expert [n, experts]; its other rows are unfilled.
    """
    filled = jnp.cumsum(counts, axis=1)
    expert = jnp.sum(jnp.arange(capacity)[None, :, None] >= filled[:, None, :], axis=2)
    order = jnp.argsort(expert.reshape(-1), stable=True)
    return Permutation(order[:, None], jnp.argsort(order)[:, None])
