"""Products of operands in 8 bits, through qwix: what is rounded to which format, and on which device.

A scale is kept for each slice along the dims that a product sums over, as large as the largest value of the slice asks
for. Every device rounds the part it holds: where a mesh axis splits a summed dim each part has scales of its own, never
larger than that of the whole slice, and is multiplied back to its size before parts are summed. So no collective is
added, and a product whose summed dims are not split is the same on any mesh: int8, summed in int32, to the bit.

Forward, both operands are rounded. Backward, int8 rounds those of the gradient of x, and leaves the gradient of a
weight in the compute dtype: summed over so many tokens, it is what int8 training loses by (SwitchBack,
arXiv:2304.13013, section 2). fp8 rounds those of both, gradients to the format of more range (arXiv:2209.05433,
section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.runtime import ShardingContext
from meshwright.runtime.shards import on_shards
from meshwright.step import MatmulDtype

Pair = tuple[Any, Any]


class Formats(NamedTuple):
    """The formats of both operands of a product, of x and the weight; and of the products of its gradients.

    of_x: of the cotangent and the weight. of_weight: of x and the cotangent. None where operands stay as they are.
    """

    forward: Pair | None
    of_x: Pair | None
    of_weight: Pair | None


UNROUNDED = Formats(None, None, None)

FORMATS: Mapping[MatmulDtype, Formats] = {
    "int8": Formats((jnp.int8, jnp.int8), (jnp.int8, jnp.int8), None),
    "fp8": Formats(
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
        (jnp.float8_e5m2, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, jnp.float8_e5m2),
    ),
}
"""What a strategy's `matmul_dtype` stands for."""


def multiply(
    subscripts: str,
    left: Array,
    right: Array,
    formats: Pair,
    *,
    dtype: Any,
    layout: ShardingContext | None = None,
    out_sharding: P | None = None,
) -> Array:
    """The einsum of two arrays, each rounded to its format, in `dtype`; summed in int32, or float32 for floats.

    layout: that of the layer it stands in, to be given where the layer is a stage's. out_sharding: as `jnp.einsum`
    takes it; to be given where a mesh axis splits a summed dim. Raises where qwix is not installed.
    """
    qwix = quantisation()
    operands, result = subscripts.split("->")
    letters = operands.split(",")

    def rounded(array: Array, letters: str, dtype: Any) -> Any:
        kept = [dim for dim, letter in enumerate(letters) if letter in result]
        return qwix.quantize(array.astype(jnp.float32), dtype, channelwise_axes=kept)

    # No gradient is taken of these, so that their types need not say how it will be summed.
    specs = tuple(P(*jax.typeof(array).sharding.spec.partitions) for array in (left, right))
    arrays = [jax.reshard(array, spec) for array, spec in zip((left, right), specs, strict=True)]
    if out_sharding is None:
        pairs = (pair for name, spec in zip(letters, specs, strict=True) for pair in zip(name, spec, strict=True))
        axes = dict(pairs)
        out_sharding = P(*(axes[letter] for letter in result))
    summed = tuple(out_sharding.unreduced)

    def local(*arrays: Array) -> Array:
        quantised = map(rounded, arrays, letters, formats)
        # qwix multiplies sums in int32 by scales in float32.
        with jax.numpy_dtype_promotion("standard"):
            part = qwix.einsum(subscripts, *quantised).astype(dtype)
        return lax.pcast(part, summed, to="unreduced")

    if layout is None:
        return jax.shard_map(local, in_specs=specs, out_specs=out_sharding)(*arrays)
    return on_shards(local, layout, in_specs=specs, out_specs=out_sharding)(*arrays)


def quantisation() -> ModuleType:
    """qwix, which takes seconds to import."""
    try:
        import qwix
    except ImportError:
        raise MeshwrightError(
            "products in int8 and fp8 want qwix; `pip install meshwright[quantized]` brings it"
        ) from None
    return qwix
