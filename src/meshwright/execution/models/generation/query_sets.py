"""Queries as the kernels of attention over pages take them: in sets that share a kv head and are padded to a size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

MASKED = -1e30
"""Score of a key that a query does not attend to: finite, so that the difference of two such scores is not NaN."""


class Partial(NamedTuple):
    """Attention over some of the keys, to be combined with the results for the other keys; all float32.

    product: values [..., h] summed with weights exp(score - largest). sums: sums of these weights [...]. largest: the
    largest score of each query [...].
    """

    product: Array
    sums: Array
    largest: Array


class QuerySets(NamedTuple):
    """How queries [b, s, k, g, h] are divided: `parts` sets for each kv head, of `rows` queries each.

    The queries of a kv head are its `length` * `group` in the order of [s, g]; the last set is padded.
    """

    batch: int
    heads: int
    length: int
    group: int
    rows: int

    @property
    def queries(self) -> int:
        """The number of queries of a kv head, without padding."""
        return self.length * self.group

    @property
    def parts(self) -> int:
        """The number of sets of a kv head."""
        return math.ceil(self.queries / self.rows)

    def arrays(self, query: Array, *widths: int) -> list[Array]:
        """Return queries [b, s, k, g, h] as arrays [k * parts, b, rows, width], h divided into `widths`."""
        whole = self._split(jnp.moveaxis(query, 2, 1).reshape(self.batch, self.heads, self.queries, -1))
        return [whole[..., start : start + width] for start, width in zip((0, *widths), widths, strict=False)]

    def positions(self, positions: Array) -> Array:
        """Return the positions [parts, b, rows] of a kv head's queries, -1 for padding, from those of tokens [b, s]."""
        return self._split(jnp.repeat(positions, self.group, axis=1)[:, None], -1)

    def by_token(self, x: Array) -> Array:
        """Return results [k * parts, b, rows, ...] as [b, s, k, g, ...]."""
        whole = jnp.moveaxis(x, 0, 1).reshape(self.batch, self.heads, self.parts * self.rows, *x.shape[3:])
        kept = whole[:, :, : self.queries].reshape(self.batch, self.heads, self.length, self.group, *x.shape[3:])
        return jnp.moveaxis(kept, 1, 2)

    def _split(self, x: Array, value: int = 0) -> Array:
        """Reshape [b, k, queries, ...] to [k * parts, b, rows, ...], padded with `value`."""
        sizes: Any = [(0, 0), (0, 0), (0, self.parts * self.rows - self.queries), *[(0, 0)] * (x.ndim - 3)]
        padded = jnp.pad(x, sizes, constant_values=value)
        return jnp.moveaxis(padded.reshape(self.batch, -1, self.rows, *x.shape[3:]), 1, 0)
