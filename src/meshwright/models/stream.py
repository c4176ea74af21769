"""Products between the residual stream and what tp splits: heads, and the width of an mlp.

Between blocks the stream is split along the sequence over tp too (Megatron's sequence parallelism, arXiv:2205.05198). A
block gathers it, multiplies by its shares of weights, and reduce-scatters what it adds; a strategy that overlaps tp
does each of these beside the products, as rings of `runtime.overlapped`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.models.attention import INTERMEDIATE
from meshwright.models.product import product
from meshwright.runtime import Layout, gather_products, product_scatter
from meshwright.runtime.shards import on_shards
from meshwright.workload import Strategy

RESIDUAL = ("batch", "residual_sequence", "activation")
GATHERED = ("batch", "sequence", "activation")


def off_stream(
    subscripts: Sequence[str],
    h: Array,
    weights: Sequence[Array],
    outs: Sequence[tuple[str, ...]],
    layout: Layout,
    strategy: Strategy,
) -> list[Array]:
    """The products of the stream h [b, s, d], as it lies between blocks, with weights that tp splits.

    subscripts: an einsum for each weight, the letter of the sequence s. outs: the logical axes of each product after
    batch and sequence, the first of which tp splits. The stream is brought together once for all.
    """
    ring = _ring(layout, outs[0][0], strategy)
    if not ring:
        whole = gathered(h, layout, outs[0][0])
        return [
            product(letters, whole, weight, matmul_dtype=strategy.matmul_dtype, layout=layout)
            for letters, weight in zip(subscripts, weights, strict=True)
        ]

    def local(h: Array, *weights: Array) -> tuple[Array, ...]:
        return gather_products(subscripts, h, weights, axes=ring, dim="s", is_two_way=_is_torus())

    made = tuple(layout.spec("batch", "sequence", *dims) for dims in outs)
    read = (layout.spec(*RESIDUAL), *map(_spec, weights))
    return list(on_shards(local, layout, in_specs=read, out_specs=made)(h, *weights))


def onto_stream(
    subscripts: str, x: Array, weight: Array, dims: tuple[str, ...], layout: Layout, strategy: Strategy
) -> Array:
    """The product of x [b, s, ...] with a weight, summed over tp, as the stream lies between blocks.

    dims: the logical axes of x after batch and sequence, the first of which tp splits.
    """
    ring = _ring(layout, dims[0], strategy)
    if not ring:
        partial = layout.spec(*GATHERED, unreduced=layout.axes(dims[0]))
        rounded = {"matmul_dtype": strategy.matmul_dtype, "layout": layout}
        added = product(subscripts, x, weight, out_sharding=partial, **rounded)
        return layout.place(added, *RESIDUAL)

    def local(x: Array, weight: Array) -> Array:
        return product_scatter(subscripts, x, weight, axes=ring, dim="s", is_two_way=_is_torus())

    specs = (layout.spec("batch", "sequence", *dims), _spec(weight))
    return on_shards(local, layout, in_specs=specs, out_specs=layout.spec(*RESIDUAL))(x, weight)


def gathered(h: Array, layout: Layout, splits: str) -> Array:
    """The input of products that split the logical axis `splits`: whole along the sequence over the axes of that.

    In two steps where some of those axes hold copies of the stream: so backward each device has its share of the sum
    over the others before it is summed over these, where XLA would sum the whole over all of them and cut it.
    """
    over = layout.axes(splits)
    copied = tuple(axis for axis in over if axis not in layout.axes("residual_sequence"))
    if 0 < len(copied) < len(over):
        h = layout.place(h, *RESIDUAL, reduced=copied)
    return checkpoint_name(layout.place(h, *GATHERED, reduced=over), INTERMEDIATE)


def _ring(layout: Layout, splits: str, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes over which products that split a logical axis are done as rings; () where none are."""
    along = layout.axes("residual_sequence")
    return tuple(axis for axis in layout.axes(splits) if axis in along) if strategy.overlaps_tp else ()


def _is_torus() -> bool:
    """Whether a ring of the mesh in context goes both ways: TPUs have two links along an axis, a switch has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu"


def _spec(array: Array) -> P:
    """How an array lies, as its type says."""
    return jax.typeof(array).sharding.spec
