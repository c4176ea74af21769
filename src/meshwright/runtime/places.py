"""Where tokens stand in their documents, and what a query sees of keys: of single ones, and of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Mask:
    """What a query sees: with `causal` keys up to its own position, with `window` that many of them, its own included.

    Without `causal` a window reaches as far to both sides.
    """

    causal: bool = True
    window: int | None = None


class Places(NamedTuple):
    """Where tokens stand in their documents [b, s], and which document of the row each belongs to, if told apart."""

    positions: Array
    segments: Array | None = None


class Bounds(NamedTuple):
    """The least and the greatest position of a block of tokens, and those of their documents, if told apart."""

    low: Array
    high: Array
    documents: tuple[Array, Array] | None = None


def is_visible(places: Places, keys: Places, mask: Mask) -> Array:
    """Whether each query sees each key, [b, s, t]."""
    return sees(jax.tree.map(lambda x: x[:, :, None], places), jax.tree.map(lambda x: x[:, None, :], keys), mask)


def sees(places: Places, keys: Places, mask: Mask) -> Array:
    """Whether queries see keys, their places broadcast against each other."""
    distance = places.positions - keys.positions
    found = distance >= 0 if mask.causal else distance == distance
    if mask.window is not None:
        found &= jnp.abs(distance) < mask.window
    if places.segments is not None and keys.segments is not None:
        found &= places.segments == keys.segments
    return found


def is_seen(places: Places, keys: Places, mask: Mask) -> Array:
    """Whether any query of a block may see any key of another, in any row, by the bounds of both: a scalar."""
    return any_may_see(bounds(places), bounds(keys), mask).any()


def bounds(places: Places) -> Bounds:
    """The bounds of a block of tokens in each row."""
    low, high, *documents = (end(axis=1) for x in places if x is not None for end in (x.min, x.max))
    return Bounds(low, high, (documents[0], documents[1]) if documents else None)


def any_may_see(queries: Bounds, keys: Bounds, mask: Mask) -> Array:
    """Whether any query of a block may see any key of another."""
    found = queries.high >= keys.low if mask.causal else queries.high == queries.high
    if mask.window is not None:
        found &= queries.low - keys.high < mask.window
        if not mask.causal:
            found &= keys.low - queries.high < mask.window
    if queries.documents and keys.documents:
        found &= (queries.documents[0] <= keys.documents[1]) & (queries.documents[1] >= keys.documents[0])
    return found


def all_see(queries: Bounds, keys: Bounds, mask: Mask) -> Array:
    """Whether every query of a block sees every key of another."""
    found = queries.low >= keys.high if mask.causal else queries.high == queries.high
    if mask.window is not None:
        found &= queries.high - keys.low < mask.window
        if not mask.causal:
            found &= keys.high - queries.low < mask.window
    if queries.documents and keys.documents:
        found &= (queries.documents[0] == keys.documents[1]) & (queries.documents[1] == keys.documents[0])
    return found
