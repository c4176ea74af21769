"""Products of the residual stream with weights that tp splits by their columns, and back to it by their rows.

Between blocks the stream is split along the sequence over tp too (Megatron's sequence parallelism, arXiv:2205.05198). A
block gathers it, multiplies by its shares of weights, and reduce-scatters what it adds; a strategy that overlaps tp
does each of these beside the products, as rings of `runtime.collective_matmul`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.models.product import product
from meshwright.models.remat import INTERMEDIATE, PRODUCT
from meshwright.runtime import ShardingContext, all_gather_matmuls, matmul_reduce_scatter
from meshwright.runtime.shards import on_shards
from meshwright.step import Strategy
from meshwright.step.layer import Linear

RESIDUAL = ("batch", "residual_sequence", "activation")
GATHERED = ("batch", "sequence", "activation")


def column_parallel_linear(
    h: Array, weights: Sequence[Array], ops: Sequence[Linear], layout: ShardingContext, strategy: Strategy
) -> list[Array]:
    """The products of h [b, s, d], as the stream lies between blocks, with weights whose columns tp splits.

    The stream is gathered once for all. Returns an array [b, s, *outputs] for each op, without its bias.
    """
    splits = ops[0].outputs[0][0]
    subscripts = ("bsd,dn->bsn",) * len(ops)
    # Columns are one dim to products: with several to sum over, backward, XLA:CPU copies the weights first.
    used = [layout.weight(_matrix(array, 1), "embed", splits, dtype=h.dtype) for array in weights]
    ring = _ring(layout, splits, strategy)
    if not ring:
        whole = gathered(h, layout, splits)
        made = [
            product(letters, whole, weight, matmul_dtype=strategy.matmul_dtype, layout=layout)
            for letters, weight in zip(subscripts, used, strict=True)
        ]
    else:

        def local(h: Array, *weights: Array) -> tuple[Array, ...]:
            return all_gather_matmuls(subscripts, h, weights, axes=ring, dim="s", is_two_way=_is_torus())

        results = (layout.spec("batch", "sequence", splits),) * len(ops)
        read = (layout.spec(*RESIDUAL), *map(_spec, used))
        made = on_shards(local, layout, in_specs=read, out_specs=results)(h, *used)
    return [
        checkpoint_name(array, PRODUCT).reshape(*h.shape[:2], *(size for _, size in op.outputs))
        for array, op in zip(made, ops, strict=True)
    ]


def row_parallel_linear(
    x: Array, weight: Array, op: Linear, layout: ShardingContext, strategy: Strategy, *, is_partial: bool = False
) -> Array:
    """The product of x [b, s, *inputs] with a weight whose rows tp splits, summed over tp, without its bias.

    It lies as the stream does between blocks, by a reduce-scatter. is_partial: leave the sum to be taken, which then is
    typed unreduced; a ring takes it all the same.
    """
    splits = op.inputs[0][0]
    used = layout.weight(_transposed(_matrix(weight, len(op.inputs))), "embed", splits, dtype=x.dtype)
    x = x.reshape(*x.shape[:2], -1)
    ring = _ring(layout, splits, strategy)
    if not ring:
        partial = layout.spec(*GATHERED, unreduced=layout.axes(splits))
        rounded = {"matmul_dtype": strategy.matmul_dtype, "layout": layout}
        added = product("bsn,dn->bsd", x, used, out_sharding=partial, **rounded)
        return added if is_partial else layout.place(added, *RESIDUAL)

    def local(x: Array, weight: Array) -> Array:
        return matmul_reduce_scatter("bsn,dn->bsd", x, weight, axes=ring, dim="s", is_two_way=_is_torus())

    specs = (layout.spec("batch", "sequence", splits), _spec(used))
    return on_shards(local, layout, in_specs=specs, out_specs=layout.spec(*RESIDUAL))(x, used)


def router_logits(h: Array, weight: Array, layout: ShardingContext) -> Array:
    """The float32 product of the stream h [b, s, d] as it lies between blocks with a router [d, e]."""
    used = layout.weight(weight, "embed", "router", dtype=h.dtype, along="residual_sequence")
    return checkpoint_name(product("bsd,de->bse", h, used, dtype=jnp.float32), PRODUCT)


def gathered(h: Array, layout: ShardingContext, splits: str) -> Array:
    """The input of products that split the logical axis `splits`: whole along the sequence over the axes of that.

    In two steps where some of those axes hold copies of the stream: so backward each device has its share of the sum
    over the others before it is summed over these, where XLA would sum the whole over all of them and cut it.
    """
    over = layout.axes(splits)
    copied = tuple(axis for axis in over if axis not in layout.axes("residual_sequence"))
    if 0 < len(copied) < len(over):
        h = layout.place(h, *RESIDUAL, reduced=copied)
    return checkpoint_name(layout.place(h, *GATHERED, reduced=over), INTERMEDIATE)


def _ring(layout: ShardingContext, splits: str, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes over which products that split a logical axis are done as rings; () where none are."""
    along = layout.axes("residual_sequence")
    return tuple(axis for axis in layout.axes(splits) if axis in along) if strategy.collective_matmul else ()


def _is_torus() -> bool:
    """Whether a ring of the mesh in context goes both ways: TPUs have two links along an axis, a switch has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu"


def _spec(array: Array) -> P:
    """How an array lies, as its type says."""
    return jax.typeof(array).sharding.spec


def _matrix(stored: Array, num_rows: int) -> Array:
    """A parameter with its first dims as one and its others as one, the first of each split as they are."""
    if stored.ndim == 2:
        return stored
    spec, shape = _spec(stored), stored.shape
    split = P(spec.partitions[0], spec.partitions[num_rows], reduced=spec.reduced)
    # Asked for no sharding, JAX 0.10.2 reshapes nothing that is typed reduced.
    return jax.lax.reshape(stored, (math.prod(shape[:num_rows]), math.prod(shape[num_rows:])), out_sharding=split)


def _transposed(stored: Array) -> Array:
    """A matrix with its last dim first, along which it is stored in shards: so gathered, they lie one after another.

    Gathered along its last dim they have to be interleaved, which takes XLA:CPU another copy of the whole.
    """
    return stored.T
