"""Column-parallel and row-parallel matmuls of the residual stream.

Between blocks the residual stream's sequence is also sharded over tp (Megatron's sequence parallelism,
arXiv:2205.05198). A block gathers it, multiplies it by shards of weights, and reduce-scatters the result; with the
strategy's `collective_matmul` both collectives overlap with the matmuls (`runtime.collective_matmul`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import Linear
from meshwright.description.step.strategy import Strategy
from meshwright.execution.models.dropout import DropoutRng, dropout_of_branch
from meshwright.execution.models.product import product
from meshwright.execution.models.remat import INTERMEDIATE, PRODUCT
from meshwright.execution.runtime.collective_matmul import all_gather_matmuls, matmul_reduce_scatter
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards

RESIDUAL = ("batch", "residual_sequence", "activation")
"""Logical axes of the residual stream [b, s, d] between blocks."""
GATHERED = ("batch", "sequence", "activation")
"""Logical axes of the residual stream [b, s, d] inside a block, gathered over tp."""

RANK_OF_STREAM = ("embed", "rank")
"""Logical axes of a low-rank weight that reads the residual stream; reversed for one whose result is added to it."""


def column_parallel_linear(
    h: Array,
    weights: Sequence[Array],
    ops: Sequence[Linear],
    layout: ShardingContext,
    strategy: Strategy,
    whole: dict[str, Array],
) -> list[Array]:
    """Multiply h [b, s, d], the residual stream or a latent, by weights whose columns may be sharded over tp.

    Args:
        weights: the weight [d, *outputs] of each op.
        ops: the matmuls, which have the same input and the same first logical axis of outputs.
        whole: {text of the mesh axes and the input's name: gathered input}. The gathered h is taken from this dict or
          added to it, so that all matmuls of the block with this input gather it once.

    Returns:
        An array [b, s, *outputs] for each op, without its bias.
    """
    rows, splits = ops[0].inputs[0][0], ops[0].outputs[0][0]
    subscripts = ("bsd,dn->bsn",) * len(ops)
    # Merge columns into one dim: with several, XLA:CPU copies the weights before backward sums over them.
    used = [layout.weight(_matrix(array, 1), rows, splits, dtype=h.dtype) for array in weights]
    ring = _ring(layout, splits, strategy)
    if not ring:
        read = f"{layout.axes(splits)} {ops[0].source}"
        if read not in whole:
            whole[read] = gathered(h, layout, splits)
        made = [
            product(letters, whole[read], weight, matmul_dtype=strategy.matmul_dtype, layout=layout)
            for letters, weight in zip(subscripts, used, strict=True)
        ]
    else:

        def local(h: Array, *weights: Array) -> tuple[Array, ...]:
            # TPUs have two links along an axis, so rings go both ways.
            return all_gather_matmuls(subscripts, h, weights, axes=ring, dim="s", is_two_way=mesh_platform() == "tpu")

        results = (layout.spec("batch", "sequence", splits),) * len(ops)
        read = (layout.spec(*RESIDUAL), *map(_spec, used))
        made = on_shards(local, layout, in_specs=read, out_specs=results)(h, *used)
    return [
        checkpoint_name(array, PRODUCT).reshape(*h.shape[:2], *weight.shape[1:])
        for array, weight in zip(made, weights, strict=True)
    ]


def row_parallel_linear(
    x: Array, weight: Array, op: Linear, layout: ShardingContext, strategy: Strategy, *, is_partial: bool = False
) -> Array:
    """Multiply x [b, s, *inputs] by a weight [*inputs, d] whose rows are sharded over tp; the bias is not added.

    The result [b, s, d] is reduce-scattered to the sharding of the residual stream. is_partial: return it unreduced
    over tp (a collective matmul reduces it regardless).
    """
    splits = op.inputs[0][0]
    # Transposed, so that gathered shards are contiguous; otherwise XLA:CPU interleaves them in another copy.
    used = layout.weight(_matrix(weight, len(op.inputs)).T, "embed", splits, dtype=x.dtype)
    x = x.reshape(*x.shape[:2], -1)
    ring = _ring(layout, splits, strategy)
    if not ring:
        partial = layout.spec(*GATHERED, unreduced=layout.axes(splits))
        rounded = {"matmul_dtype": strategy.matmul_dtype, "layout": layout}
        added = product("bsn,dn->bsd", x, used, out_sharding=partial, **rounded)
        return added if is_partial else layout.place(added, *RESIDUAL)

    def local(x: Array, weight: Array) -> Array:
        return matmul_reduce_scatter("bsn,dn->bsd", x, weight, axes=ring, dim="s", is_two_way=mesh_platform() == "tpu")

    specs = (layout.spec("batch", "sequence", splits), _spec(used))
    return on_shards(local, layout, in_specs=specs, out_specs=layout.spec(*RESIDUAL))(x, used)


def low_rank_columns(
    h: Array, a: Array, b: Array, op: Linear, layout: ShardingContext, rng: DropoutRng | None, *, dtype: Any = None
) -> Array:
    """Return the low-rank branch (h A) B [b, s, *outputs] of a column-parallel matmul; h [b, s, d] is the stream.

    h A [b, s, rank] is computed from the shards of h and then gathered; h itself is not.

    Args:
        a, b: the weights A [d, rank] and B [rank, *outputs].
        rng: dropout of the branch's input; None for no dropout.
        dtype: dtype of the result; default: that of h.
    """
    assert op.low_rank
    splits = op.outputs[0][0]
    h = dropout_of_branch(h, rng, op.low_rank.dropout, op.branch)
    into = layout.weight(a, *RANK_OF_STREAM, dtype=h.dtype, along="residual_sequence")
    low = checkpoint_name(product("bsd,dr->bsr", h, into), PRODUCT) * jnp.asarray(op.low_rank.scale, h.dtype)
    out = layout.weight(_matrix(b, 1), "rank", splits, dtype=h.dtype)
    made = product("bsr,rn->bsn", gathered(low, layout, splits), out, dtype=dtype)
    return made.reshape(*h.shape[:2], *b.shape[1:])


def low_rank_rows(x: Array, a: Array, b: Array, op: Linear, layout: ShardingContext, rng: DropoutRng | None) -> Array:
    """Return the low-rank branch (x A) B [b, s, d] of a row-parallel matmul of x [b, s, *inputs].

    x A [b, s, rank] is reduce-scattered instead of the result, which is sharded like the residual stream. Arguments are
    as in `low_rank_columns`, with A [*inputs, rank] and B [rank, d].
    """
    assert op.low_rank
    splits = op.inputs[0][0]
    into = layout.weight(_matrix(a, len(op.inputs)), splits, "rank", dtype=x.dtype)
    partial = layout.spec(*GATHERED, unreduced=layout.axes(splits))
    x = dropout_of_branch(x.reshape(*x.shape[:2], -1), rng, op.low_rank.dropout, op.name)
    low = product("bsn,nr->bsr", x, into, out_sharding=partial)
    low = checkpoint_name(layout.place(low, *RESIDUAL), PRODUCT) * jnp.asarray(op.low_rank.scale, x.dtype)
    out = layout.weight(b, *reversed(RANK_OF_STREAM), dtype=x.dtype, along="residual_sequence")
    return product("bsr,rd->bsd", low, out)


def low_rank_residual(
    x: Array, a: Array, b: Array, op: Linear, layout: ShardingContext, rng: DropoutRng | None
) -> Array:
    """Return the low-rank branch (x A) B [b, s, o] of a matmul in the layout of the residual stream.

    Arguments are as in `low_rank_columns`, with x [b, s, i], A [i, rank] and B [rank, o].
    """
    assert op.low_rank
    ((inputs, _),), ((outputs, _),) = op.inputs, op.outputs
    x = dropout_of_branch(x, rng, op.low_rank.dropout, op.branch)
    into = layout.weight(a, inputs, "rank", dtype=x.dtype, along="residual_sequence")
    low = checkpoint_name(product("bsi,ir->bsr", x, into), PRODUCT) * jnp.asarray(op.low_rank.scale, x.dtype)
    out = layout.weight(b, "rank", outputs, dtype=x.dtype, along="residual_sequence")
    return product("bsr,ro->bso", low, out)


def residual_linear(
    x: Array, weight: Array, op: Linear, layout: ShardingContext, whole: dict[str, Array] | None = None
) -> Array:
    """Multiply x [b, s, i], split like the residual stream, by a weight [i, o] that no device of tp has a part of.

    The result is in the dtype of x, of a router in float32.

    whole: {name: gathered weight}, from which a weight that a layer uses twice is taken, or to which it is added.
    """
    ((inputs, _),), ((outputs, _),) = op.inputs, op.outputs
    whole = {} if whole is None else whole
    if op.name not in whole:
        whole[op.name] = layout.weight(weight, inputs, outputs, dtype=x.dtype, along="residual_sequence")
    used = whole[op.name]
    return checkpoint_name(product("bsi,io->bso", x, used, dtype=result_dtype(op, x)), PRODUCT)


def result_dtype(op: Linear, x: Array) -> Any:
    """Return the dtype of the product of x in the layout of the residual stream: that of x, of a router float32."""
    return jnp.float32 if op.outputs[0][0] == "router" else x.dtype


def gathered(h: Array, layout: ShardingContext, splits: str) -> Array:
    """Gather the residual stream along the sequence, for matmuls with weights whose logical axis `splits` is sharded.

    If the stream is replicated over some of that axis's mesh axes, this is two reshards, so that backward
    reduce-scatters before it all-reduces over the replicated axes; with one, XLA would all-reduce over all and slice.
    """
    over = layout.axes(splits)
    copied = tuple(axis for axis in over if axis not in layout.axes("residual_sequence"))
    if 0 < len(copied) < len(over):
        h = layout.place(h, *RESIDUAL, reduced=copied)
    return checkpoint_name(layout.place(h, *GATHERED, reduced=over), INTERMEDIATE)


def _ring(layout: ShardingContext, splits: str, strategy: Strategy) -> tuple[str, ...]:
    """Return the mesh axes of the ring of collective matmuls with weights split along logical axis `splits`, or ()."""
    along = layout.axes("residual_sequence")
    return tuple(axis for axis in layout.axes(splits) if axis in along) if strategy.collective_matmul else ()


def _spec(array: Array) -> P:
    return jax.typeof(array).sharding.spec


def _matrix(stored: Array, num_rows: int) -> Array:
    """Reshape a parameter to a matrix: merge its first `num_rows` dims, and the others. Both keep their sharding."""
    if stored.ndim == 2:
        return stored
    spec, shape = _spec(stored), stored.shape
    split = P(spec.partitions[0], spec.partitions[num_rows], reduced=spec.reduced)
    # Without an out_sharding JAX 0.10.2 cannot reshape arrays that are typed reduced.
    return jax.lax.reshape(stored, (math.prod(shape[:num_rows]), math.prod(shape[num_rows:])), out_sharding=split)
