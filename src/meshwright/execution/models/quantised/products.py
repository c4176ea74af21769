"""Matmuls of operands quantized to 8 bits, with qwix.

Each slice along the summed dims has one scale, computed from its largest value. Each device quantizes its own shards.
If a summed dim is sharded, each shard has its own scales, never larger than those of whole slices, and products are
dequantized before the sum over devices. So no collective is added, and a matmul whose summed dims are not sharded gives
the same result on any mesh (bit-identical for int8, which is summed in int32).

Forward quantizes both operands. Backward with int8 quantizes only the matmul for the gradient of x: the weight
gradient, a sum over many tokens, needs the precision of the compute dtype (SwitchBack, arXiv:2304.13013, section 2).
fp8 quantizes both, with cotangents in the format with more range (arXiv:2209.05433, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.strategy import MatmulDtype
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards

Pair = tuple[Any, Any]


class Formats(NamedTuple):
    """The dtypes to which the operands of three matmuls are quantized; None for a matmul that is not quantized.

    forward: dtypes of (x, weight). of_x: dtypes of (cotangent, weight) in the gradient of x. of_weight: dtypes of
    (x, cotangent) in the gradient of the weight.
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
"""The formats for a strategy's `matmul_dtype`."""


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
    """Return the einsum of two arrays quantized to the two dtypes in `formats`; int8 sums in int32, fp8 in float32.

    Args:
        dtype: dtype of the result.
        layout: sharding context of the layer, required in pipeline stages.
        out_sharding: as in `jnp.einsum`, required if a summed dim is sharded.

    Raises:
        MeshwrightError: qwix is not installed.
    """
    qwix = quantisation()
    operands, result = subscripts.split("->")
    letters = operands.split(",")

    def rounded(array: Array, letters: str, dtype: Any) -> Any:
        kept = [dim for dim, letter in enumerate(letters) if letter in result]
        return qwix.quantize(array.astype(jnp.float32), dtype, channelwise_axes=kept)

    # This code is not differentiated, so drop `reduced` from the types.
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
    """Import qwix, which takes seconds. Raises if it is not installed."""
    try:
        import qwix
    except ImportError:
        raise MeshwrightError(
            "matmuls in int8 and fp8 need qwix; install it with `pip install meshwright[quantized]`"
        ) from None
    return qwix
