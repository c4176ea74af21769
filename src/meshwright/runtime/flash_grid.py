"""The grid of a Pallas kernel of attention: its blocks of queries and of keys, and which go together in a step of it.

Queries are [b, n, s, h] of n = k g heads, keys and values [b, k, t, h], sums of a softmax [b, n, 1, s]; letters of dims
as in `blockwise`. A kernel has its blocks of them without batch and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshwright.cost.attention import LANES
from meshwright.runtime.places import Bounds, Mask, Places, any_may_see, bounds

Ref = Any
"""A block of an array inside a kernel, which is read and written in place."""

Kind = Literal["queries", "sums", "keys"]
Arrays = Sequence[tuple[Kind, Array]]


class Step(NamedTuple):
    """What a step of a grid works on: a row of the batch, a query head and its kv head, a block of queries, of keys."""

    row: Any
    head: Any
    kv_head: Any
    queries: Any
    keys: Any


@dataclass(frozen=True)
class Grid:
    """A grid over the blocks of queries and keys of some shapes.

    Its inner steps go through the blocks of keys; `by_keys` through those of queries, of all heads of a kv head.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    mask: Mask
    by_keys: bool = False

    @property
    def rows(self) -> int:
        """The queries of a block."""
        return _block_size(self.queries[2], self.queries[3])

    @property
    def columns(self) -> int:
        """The keys of a block."""
        return _block_size(self.keys[2], self.keys[3])

    @property
    def steps(self) -> tuple[int, ...]:
        """The number of steps at each level, outermost first."""
        b, n, s, _ = self.queries
        _, k, t, _ = self.keys
        rows, columns = s // self.rows, t // self.columns
        return (b, k, columns, n // k, rows) if self.by_keys else (b, n, rows, columns)

    def step(self, ids: Sequence[Any]) -> Step:
        """What the step at some place of each level works on."""
        group = self.queries[1] // self.keys[1]
        if self.by_keys:
            row, kv_head, keys, query, queries = ids
            return Step(row, kv_head * group + query, kv_head, queries, keys)
        row, head, queries, keys = ids
        return Step(row, head, jax.lax.div(head, group), queries, keys)

    def here(self) -> tuple[Step, Any, Any]:
        """Inside a kernel: what its step works on, and whether it is the first and the last with the same results."""
        places = [pl.program_id(level) for level in range(len(self.steps))]
        inner = list(zip(places, self.steps, strict=True))[3:]
        is_first = math.prod(place == 0 for place, _ in inner)
        is_last = math.prod(place == count - 1 for place, count in inner)
        return self.step(places), is_first, is_last

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        places: tuple[Places, Places],
        *,
        carried: Arrays,
        read: Arrays,
        num_products: int,
        num_scratch: int = 0,
    ) -> list[Array]:
        """The carried arrays as a kernel leaves them, that also reads others, and the places of queries and of keys.

        A kernel is called with the grid and references to: the bounds of all blocks of queries, of keys; blocks of what
        is carried, of what is read, of the places of queries, of keys, of results; scratch [rows, LANES] in float32.
        num_products: how many products as large as that of queries and keys it makes, for the compiler's schedule.
        """
        b, sizes = self.queries[0], (self.rows, self.columns)
        limits = [_limits(of, size, b) for of, size in zip(places, sizes, strict=True)]
        lines = [_lines(of, b) for of in places]
        arrays = [array for _, array in (*carried, *read)]
        specs = [self._spec(kind, array.shape) for kind, array in (*carried, *read)]
        return pl.pallas_call(
            partial(kernel, self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.steps,
                in_specs=[*specs, self._places_spec(lines[0], 3), self._places_spec(lines[1], 4)],
                out_specs=specs[: len(carried)],
                scratch_shapes=[pltpu.VMEM((self.rows, LANES), jnp.float32)] * num_scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for _, array in carried],
            # The bounds count among the operands.
            input_output_aliases={2 + index: index for index in range(len(carried))},
            cost_estimate=self._cost(num_products, arrays),
            name=name,
        )(*limits, *arrays, *lines)

    def _spec(self, kind: Kind, shape: tuple[int, ...]) -> pl.BlockSpec:
        """The block of an array that a step has."""

        def index(*ids: Any) -> tuple[Any, ...]:
            step = self._fetched(*ids)
            if kind == "keys":
                return step.row, step.kv_head, step.keys, 0
            return (
                (step.row, step.head, step.queries, 0) if kind == "queries" else (step.row, step.head, 0, step.queries)
            )

        if kind == "sums":
            return pl.BlockSpec((None, None, 1, self.rows), index)
        return pl.BlockSpec((None, None, self.columns if kind == "keys" else self.rows, shape[-1]), index)

    def _places_spec(self, lines: Array, which: int) -> pl.BlockSpec:
        """The block of places, of queries or of keys, that a step has."""

        def index(*ids: Any) -> tuple[Any, ...]:
            step = self._fetched(*ids)
            return step.row, 0, step[which]

        return pl.BlockSpec((None, lines.shape[1], self.rows if which == 3 else self.columns), index)

    def _fetched(self, *ids: Any) -> Step:
        """What is fetched for a step: its blocks, where something is seen, else the first of the inner ones."""
        step, limits = self.step(ids[:-2]), ids[-2:]
        is_seen = any_may_see(*bounds_of(step, limits), self.mask)
        if self.by_keys:
            return step._replace(queries=jnp.where(is_seen, step.queries, 0))
        return step._replace(keys=jnp.where(is_seen, step.keys, 0))

    def _cost(self, num_products: int, arrays: Sequence[Array]) -> pl.CostEstimate:
        """The work of a call; of a causal mask, which positions decide on, half of all scores."""
        scores = math.prod(self.queries[:3]) * self.keys[2] // (2 if self.mask.causal else 1)
        return pl.CostEstimate(
            flops=2 * num_products * scores * self.queries[3],
            bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
            transcendentals=scores,
        )


def bounds_of(step: Step, limits: Sequence[Ref]) -> tuple[Bounds, Bounds]:
    """The bounds of a step's block of queries, and of its block of keys."""
    of_queries, of_keys = limits
    return _read(of_queries, step.row, step.queries), _read(of_keys, step.row, step.keys)


def _read(limits: Ref, row: Any, block: Any) -> Bounds:
    """The bounds of a block, of what `_limits` has."""
    low, high, *documents = (limits[row, index, block] for index in range(limits.shape[1]))
    return Bounds(low, high, (documents[0], documents[1]) if documents else None)


def _limits(places: Places, size: int, batch: int) -> Array:
    """The bounds of all blocks [b, 2 or 4, blocks]."""
    found = bounds(jax.tree.map(lambda x: x.reshape(-1, size), places))
    each = jnp.stack([found.low, found.high, *(found.documents or ())])
    rows = jnp.moveaxis(each.reshape(len(each), len(places.positions), -1), 1, 0)
    return jnp.broadcast_to(rows, (batch, *rows.shape[1:]))


def _lines(places: Places, batch: int) -> Array:
    """Positions, and documents if told apart, [b, 1 or 2, length]."""
    found = [x for x in places if x is not None]
    return jnp.broadcast_to(jnp.stack(found, axis=1), (batch, len(found), found[0].shape[1]))


def _block_size(length: int, head_dim: int) -> int:
    """The tokens of a block; none lies in both halves of a length, which in zigzag order are far from each other.

    By the instructions that the compiler makes for v5e (as benchmarks/tpu_attention.py reads them), forward keeps the
    matrix units busy for 60% of the cycles of a whole block of 512 tokens, and for 90% of one of 1,024, heads of 128.
    Of larger heads such blocks do not fit into the 16 MiB that a v4 gives a kernel.
    """
    sizes = (1024, 512, 256) if head_dim <= LANES else (512, 256)
    return next((size for size in sizes if length % (2 * size) == 0), LANES)
