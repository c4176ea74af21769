"""Token positions and document ids, and the attention mask that they determine, per token and per block of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to, by position.

    causal: exclude keys at later positions. window: attend to keys less than `window` positions away, on both sides if
    not causal; None for no limit. is_chunked: positions are split into chunks of `window` instead, and a query attends
    to keys of its own chunk.
    """

    causal: bool = True
    window: int | None = None
    is_chunked: bool = False


class Segments(NamedTuple):
    """Positions of tokens in their documents [b, s], and document ids [b, s] (None if each row is one document)."""

    positions: Array
    ids: Array | None = None


class Bounds(NamedTuple):
    """Minimum and maximum position of a block of tokens and, if there are document ids, the minimum and maximum id."""

    low: Array
    high: Array
    documents: tuple[Array, Array] | None = None


def pairwise_mask(queries: Segments, keys: Segments, mask: Mask) -> Array:
    """Return the attention mask [b, s, t] of queries [b, s] over keys [b, t]."""
    return attention_mask(
        jax.tree.map(lambda x: x[:, :, None], queries), jax.tree.map(lambda x: x[:, None, :], keys), mask
    )


def attention_mask(queries: Segments, keys: Segments, mask: Mask) -> Array:
    """Return the attention mask, True where a query attends; segments of queries and keys broadcast to its shape."""
    distance = queries.positions - keys.positions
    found = distance >= 0 if mask.causal else distance == distance
    if mask.window is not None and mask.is_chunked:
        found &= queries.positions // mask.window == keys.positions // mask.window
    elif mask.window is not None:
        found &= jnp.abs(distance) < mask.window
    if queries.ids is not None and keys.ids is not None:
        found &= queries.ids == keys.ids
    return found


def any_visible(queries: Segments, keys: Segments, mask: Mask) -> Array:
    """Return a boolean scalar: whether in some row a query of a block may attend to a key of another block.

    It is computed from the bounds of positions and document ids: if True, all keys may still be masked.
    """
    return bounds_any_visible(bounds(queries), bounds(keys), mask).any()


def bounds(queries: Segments) -> Bounds:
    """Return the bounds of a block of tokens for each row [b]."""
    low, high, *documents = (end(axis=1) for x in queries if x is not None for end in (x.min, x.max))
    return Bounds(low, high, (documents[0], documents[1]) if documents else None)


def bounds_any_visible(queries: Bounds, keys: Bounds, mask: Mask) -> Array:
    """Whether any query within its bounds may attend to any key within its bounds."""
    found = queries.high >= keys.low if mask.causal else queries.high == queries.high
    if mask.window is not None and mask.is_chunked:
        found &= queries.low // mask.window <= keys.high // mask.window
        found &= queries.high // mask.window >= keys.low // mask.window
    elif mask.window is not None:
        found &= queries.low - keys.high < mask.window
        if not mask.causal:
            found &= keys.low - queries.high < mask.window
    if queries.documents and keys.documents:
        found &= (queries.documents[0] <= keys.documents[1]) & (queries.documents[1] >= keys.documents[0])
    return found


def bounds_all_visible(queries: Bounds, keys: Bounds, mask: Mask) -> Array:
    """Whether every query within its bounds attends to every key within its bounds, so that no mask is needed."""
    found = queries.low >= keys.high if mask.causal else queries.high == queries.high
    if mask.window is not None and mask.is_chunked:
        found &= (
            jnp.minimum(queries.low, keys.low) // mask.window == jnp.maximum(queries.high, keys.high) // mask.window
        )
    elif mask.window is not None:
        found &= queries.high - keys.low < mask.window
        if not mask.causal:
            found &= keys.high - queries.low < mask.window
    if queries.documents and keys.documents:
        found &= (queries.documents[0] == keys.documents[1]) & (queries.documents[1] == keys.documents[0])
    return found
