"""The grid of the Pallas attention kernels: which block of queries and which block of keys each grid step reads.

Queries are [b, n, s, h] with n = k * g heads, keys and values [b, k, t, h], where h of values may differ, softmax sums
[b, n, 1, s]; letters of dims are as in `blockwise`. Inside a kernel, blocks have no batch and head dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from meshwright.execution.runtime.attention.segments import Bounds, Mask, Segments, bounds, bounds_any_visible
from meshwright.planning.cost.rates.attention import LANES, TpuKernel, tpu_kernel_width

Ref = Any
"""A block of an array inside a kernel, read and written in place."""

Kind = Literal["queries", "sums", "keys"]
"""The shape of an array: like queries, like softmax sums of queries, or like keys and values."""
Arrays = Sequence[tuple[Kind, Array]]


class GridStep(NamedTuple):
    """Indices of a grid step: batch row, query head and its kv head, block of queries, block of keys."""

    row: Any
    head: Any
    kv_head: Any
    queries: Any
    keys: Any


@dataclass(frozen=True)
class Grid:
    """A grid over the blocks of queries and keys.

    queries, keys: shapes of both. value_dim: head dim of the values. by_keys: False if the inner loop runs over blocks
    of keys; True if it runs over blocks of queries, of all query heads of a kv head.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    value_dim: int
    mask: Mask
    by_keys: bool = False

    @property
    def rows(self) -> int:
        """Queries per block."""
        return _block_size(self.queries[2], self.queries[3])

    @property
    def columns(self) -> int:
        """Keys per block."""
        return _block_size(self.keys[2], self.keys[3])

    @property
    def steps(self) -> tuple[int, ...]:
        """The grid: number of steps at each level, outermost first."""
        b, n, s, _ = self.queries
        _, k, t, _ = self.keys
        rows, columns = s // self.rows, t // self.columns
        return (b, k, columns, n // k, rows) if self.by_keys else (b, n, rows, columns)

    def step(self, ids: Sequence[Any]) -> GridStep:
        """Return the grid step at the given program ids."""
        group = self.queries[1] // self.keys[1]
        if self.by_keys:
            row, kv_head, keys, query, queries = ids
            return GridStep(row, kv_head * group + query, kv_head, queries, keys)
        row, head, queries, keys = ids
        return GridStep(row, head, jax.lax.div(head, group), queries, keys)

    def here(self) -> tuple[GridStep, Any, Any]:
        """Return the current step of a kernel, and whether it is the first, and the last, step of its output block."""
        ids = [pl.program_id(level) for level in range(len(self.steps))]
        inner = list(zip(ids, self.steps, strict=True))[3:]
        is_first = reduce(jnp.logical_and, [place == 0 for place, _ in inner])
        is_last = reduce(jnp.logical_and, [place == count - 1 for place, count in inner])
        return self.step(ids), is_first, is_last

    def call(
        self,
        kernel: Callable[..., None],
        name: TpuKernel,
        segments: tuple[Segments, Segments],
        *,
        carried: Arrays,
        read: Arrays,
        num_scratch: int = 0,
    ) -> list[Array]:
        """Run a kernel over the grid and return the updated `carried` arrays.

        The kernel is called with the grid and references to: the bounds of all query blocks and of all key blocks;
        blocks of the carried arrays, of the read arrays, of the segments of queries and of keys; the result blocks;
        scratch [rows, LANES] in float32.

        Args:
          kernel: the kernel body.
          name: the kernel's name; with the prefix `flash_` also in profiles.
          segments: segments of queries and of keys.
          carried: arrays that the kernel updates in place.
          read: arrays that the kernel only reads.
          num_scratch: number of scratch buffers.
        """
        from jax.experimental.pallas import tpu as pltpu  # Imported late: 0.2 s that only TPUs need.

        b, sizes = self.queries[0], (self.rows, self.columns)
        limits = [_limits(of, size, b) for of, size in zip(segments, sizes, strict=True)]
        lines = [_lines(of, b) for of in segments]
        arrays = [array for _, array in (*carried, *read)]
        specs = [self._spec(kind, array.shape) for kind, array in (*carried, *read)]
        # A causal mask halves the number of scores.
        scores = math.prod(self.queries[:3]) * self.keys[2] // (2 if self.mask.causal else 1)
        return pl.pallas_call(
            partial(kernel, self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.steps,
                in_specs=[*specs, self._segments_spec(lines[0], 3), self._segments_spec(lines[1], 4)],
                out_specs=specs[: len(carried)],
                scratch_shapes=[pltpu.VMEM((self.rows, LANES), jnp.float32)] * num_scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for _, array in carried],
            # Operands 0 and 1 are the bounds.
            input_output_aliases={2 + index: index for index in range(len(carried))},
            cost_estimate=pl.CostEstimate(
                flops=2 * scores * tpu_kernel_width(name, self.queries[3], self.value_dim),
                bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
                transcendentals=scores,
            ),
            name=f"flash_{name}",
        )(*limits, *arrays, *lines)

    def _spec(self, kind: Kind, shape: tuple[int, ...]) -> pl.BlockSpec:
        def index(*ids: Any) -> tuple[Any, ...]:
            step = self._fetched(*ids)
            if kind == "keys":
                return step.row, step.kv_head, step.keys, 0
            at = (step.queries, 0) if kind == "queries" else (0, step.queries)
            return step.row, step.head, *at

        if kind == "sums":
            return pl.BlockSpec((None, None, 1, self.rows), index)
        return pl.BlockSpec((None, None, self.columns if kind == "keys" else self.rows, shape[-1]), index)

    def _segments_spec(self, lines: Array, which: int) -> pl.BlockSpec:
        def index(*ids: Any) -> tuple[Any, ...]:
            step = self._fetched(*ids)
            return step.row, 0, step[which]

        return pl.BlockSpec((None, lines.shape[1], self.rows if which == 3 else self.columns), index)

    def _fetched(self, *ids: Any) -> GridStep:
        """Return the step whose blocks are fetched: this step, or if it is fully masked the inner loop's first."""
        step, limits = self.step(ids[:-2]), ids[-2:]
        is_visible = bounds_any_visible(*bounds_of(step, limits), self.mask)
        if self.by_keys:
            return step._replace(queries=jnp.where(is_visible, step.queries, 0))
        return step._replace(keys=jnp.where(is_visible, step.keys, 0))


def bounds_of(step: GridStep, limits: Sequence[Ref]) -> tuple[Bounds, Bounds]:
    """Return the bounds of a step's block of queries, and of its block of keys, given those of all blocks."""
    of_queries, of_keys = limits
    return _read(of_queries, step.row, step.queries), _read(of_keys, step.row, step.keys)


def _read(limits: Ref, row: Any, block: Any) -> Bounds:
    low, high, *documents = (limits[row, index, block] for index in range(limits.shape[1]))
    return Bounds(low, high, (documents[0], documents[1]) if documents else None)


def _limits(segments: Segments, size: int, batch: int) -> Array:
    """Return the bounds of all blocks of `size` tokens, [b, 2 or 4, blocks]: the fields of `Bounds`."""
    found = bounds(jax.tree.map(lambda x: x.reshape(-1, size), segments))
    each = jnp.stack([found.low, found.high, *(found.documents or ())])
    rows = jnp.moveaxis(each.reshape(len(each), len(segments.positions), -1), 1, 0)
    return jnp.broadcast_to(rows, (batch, *rows.shape[1:]))


def _lines(segments: Segments, batch: int) -> Array:
    """Return positions, and document ids if any, as one array [b, 1 or 2, length]."""
    found = [x for x in segments if x is not None]
    return jnp.broadcast_to(jnp.stack(found, axis=1), (batch, len(found), found[0].shape[1]))


def _block_size(length: int, head_dim: int) -> int:
    """Return the tokens per block. No block crosses the middle of a length: in zigzag order its halves are far apart.

    Sizes are chosen from code compiled for v5e (benchmarks/tpu_attention.py): with a head dim of 128, forward keeps the
    matrix units busy for 60% of the time of an unmasked block of 512 tokens, and for 90% with 1,024. With larger heads,
    blocks of 1,024 exceed the 16 MiB of VMEM that a v4 gives a kernel.
    """
    sizes = (1024, 512, 256) if head_dim <= LANES else (512, 256)
    return next((size for size in sizes if length % (2 * size) == 0), LANES)
