"""Collective matmul: a matmul overlapped with its collective, as a ring of permutes under `shard_map`.

`all_gather_matmul` is an all-gather followed by a matmul: while a device multiplies one shard, it receives the next.
`matmul_reduce_scatter` is a matmul followed by a reduce-scatter: while a device receives the partial sum of one shard,
it computes the next term of it. Each function is the transpose of the other, so backward overlaps as well.

Source: S. Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models, ASPLOS 2023 (doi.org/10.1145/3567955.3567959).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import widest
from meshwright.execution.runtime.shards import match_varying

GATHERED_BY_RING = "brought by a ring"
"""Checkpoint name of gathered arrays; a remat policy that saves them avoids a second gather in backward."""


@dataclass(frozen=True)
class DeviceRing:
    """The devices along mesh axes as a closed ring, and the dim (a letter of the einsum) sharded over them.

    is_two_way: send a shard as two halves, one in each direction, over both links of a device.
    """

    axes: tuple[str, ...]
    dim: str
    is_two_way: bool


@dataclass(frozen=True)
class Einsum:
    """An einsum of two arrays: the letters of the dims of both operands and of the result."""

    left: str
    right: str
    out: str

    @property
    def formula(self) -> str:
        """The einsum string that `jnp.einsum` takes."""
        return f"{self.left},{self.right}->{self.out}"


@dataclass(frozen=True)
class _Lane:
    """A part of each shard that is sent in one direction round the ring.

    start, size: the part's elements of the shard's ring dim. step: +1 to send to the next device, -1 to the previous.
    """

    start: int
    size: int
    step: int


class _Part(NamedTuple):
    """A part of an array along the gathered dim: its value, its offset in the dim, and the size of the whole dim."""

    value: Array
    offset: Array
    whole: int


class _Product(NamedTuple):
    """An einsum with its operands."""

    einsum: Einsum
    left: Array
    right: Array


def all_gather_matmul(
    formula: str, shard: Array, other: Array, *, axes: str | tuple[str, ...], dim: str, is_two_way: bool = True
) -> Array:
    """Return einsum(formula, all_gather(shard), other), computed as a ring. Call it under `shard_map`.

    The matmul accumulates in float32; the result has the operands' dtype. Backward reads the gathered array, which has
    the checkpoint name `GATHERED_BY_RING`.

    Args:
      formula: einsum of two arrays; each letter is in at least two of the three arrays.
      shard: this device's shard of the first operand.
      other: the second operand.
      axes: mesh axes of the ring.
      dim: the letter of the first operand's dim that is sharded over `axes`.
      is_two_way: send halves of each shard in both directions, for the two links of a torus axis; on a switch, use one
        direction.
    """
    (result,) = all_gather_matmuls((formula,), shard, (other,), axes=axes, dim=dim, is_two_way=is_two_way)
    return result


def all_gather_matmuls(
    formulas: Sequence[str],
    shard: Array,
    others: Sequence[Array],
    *,
    axes: str | tuple[str, ...],
    dim: str,
    is_two_way: bool = True,
) -> tuple[Array, ...]:
    """Return `all_gather_matmul` of one shard with each of several arrays; shard and gradient go round the ring once.

    The shard must have the same letters in all formulas.
    """
    ring = DeviceRing(_as_tuple(axes), dim, is_two_way)
    einsums = tuple(_parse_einsum(formula, dim, array="left") for formula in formulas)
    shard, *others = match_varying(shard, *others, axes=ring.axes)
    return _all_gather_matmuls(einsums, ring, shard, tuple(others))


def matmul_reduce_scatter(
    formula: str, left: Array, right: Array, *, axes: str | tuple[str, ...], dim: str, is_two_way: bool = True
) -> Array:
    """Return this device's shard of psum_scatter(einsum(formula, left, right)), computed as a ring.

    `dim` is the letter of the result's dim that is scattered; other arguments are as in `all_gather_matmul`. Partial
    sums are sent in the operands' dtype, as in an ordinary reduce-scatter.

    Raises:
        MeshwrightError: the number of devices of the ring does not divide the dim.
    """
    ring = DeviceRing(_as_tuple(axes), dim, is_two_way)
    einsum = _parse_einsum(formula, dim, array="out")
    left, right = match_varying(left, right, axes=ring.axes)
    size, degree = _dim_size(_Product(einsum, left, right), ring), lax.axis_size(ring.axes)
    if size % degree:
        raise MeshwrightError(
            f"dim {dim} of {formula} has size {size}, no multiple of the {degree} devices of the ring"
        )
    return _matmul_reduce_scatter(einsum, ring, left, right)


def can_overlap(formula: str, dim: str) -> bool:
    """Whether `all_gather_matmul` and `matmul_reduce_scatter` accept a formula and a dim in it."""
    inputs, _, out = formula.partition("->")
    arrays = [*inputs.split(","), out]
    return len(arrays) == 3 and dim in inputs and all(sum(d in a for a in arrays) > 1 for d in formula if d.isalpha())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_gather_matmuls(
    einsums: tuple[Einsum, ...], ring: DeviceRing, shard: Array, others: tuple[Array, ...]
) -> tuple[Array, ...]:
    return _gather(einsums, ring, shard, others)[0]


def _all_gather_matmuls_forward(
    einsums: tuple[Einsum, ...], ring: DeviceRing, shard: Array, others: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, tuple[Array, ...]]]:
    products, whole = _gather(einsums, ring, shard, others)
    return products, (checkpoint_name(whole, GATHERED_BY_RING), others)


def _all_gather_matmuls_backward(
    einsums: tuple[Einsum, ...], ring: DeviceRing, kept: tuple[Array, tuple[Array, ...]], gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """Return the gradients of the shard and of the other operands. kept: the gathered array, and the other operands.

    The gradient of the shard is a `matmul_reduce_scatter` of a sum of matmuls; the others need no communication.
    """
    whole, others = kept
    # Without the barrier, XLA recomputes a gradient for each of its slices.
    gradients = lax.optimization_barrier(gradients)
    found = list(zip(einsums, gradients, others, strict=True))
    of_shard = _scatter(
        [_Product(Einsum(e.out, e.right, e.left), gradient, other) for e, gradient, other in found], ring
    )
    of_others = (_multiply(Einsum(e.left, e.out, e.right), whole, gradient) for e, gradient, _ in found)
    return of_shard, tuple(value.astype(other.dtype) for value, other in zip(of_others, others, strict=True))


_all_gather_matmuls.defvjp(_all_gather_matmuls_forward, _all_gather_matmuls_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul_reduce_scatter(einsum: Einsum, ring: DeviceRing, left: Array, right: Array) -> Array:
    return _scatter([_Product(einsum, left, right)], ring)


def _matmul_reduce_scatter_forward(
    einsum: Einsum, ring: DeviceRing, left: Array, right: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _matmul_reduce_scatter(einsum, ring, left, right), (left, right)


def _matmul_reduce_scatter_backward(
    einsum: Einsum, ring: DeviceRing, kept: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """Return the gradients of `left`, by `all_gather_matmul`, and of `right`, from the array gathered for it."""
    left, right = kept
    (of_left,), whole = _gather((Einsum(einsum.out, einsum.right, einsum.left),), ring, gradient, (right,))
    of_right = _multiply(Einsum(einsum.left, einsum.out, einsum.right), left, whole)
    return of_left.astype(left.dtype), of_right.astype(right.dtype)


_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


def _gather(
    einsums: tuple[Einsum, ...], ring: DeviceRing, shard: Array, others: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    """Gather a shard round a ring while multiplying it, as first operand of each einsum, by the other operands.

    Returns the results of the einsums, and the gathered array. After n hops, a lane with step +1 holds a part of the
    shard of the device n positions before this one (see `_Lane`).
    """
    degree, place = lax.axis_size(ring.axes), lax.axis_index(ring.axes)
    dim = einsums[0].left.index(ring.dim)
    size = shard.shape[dim]
    lanes = _lanes(size, ring)
    parts = [lax.slice_in_dim(shard, lane.start, lane.start + lane.size, axis=dim) for lane in lanes]
    results: list[Any] = [None] * len(einsums)
    whole = _empty(shard, dim, size * degree)
    for hop in range(degree):
        arriving = [_permute(part, lane, ring) for part, lane in zip(parts, lanes, strict=True) if hop < degree - 1]
        for number, (part, lane) in enumerate(zip(parts, lanes, strict=True)):
            offset = (place - hop * lane.step) % degree * size + lane.start
            results = [
                _add_part(einsum, ring, before, _Part(part, offset, size * degree), other)
                for einsum, before, other in zip(einsums, results, others, strict=True)
            ]
            whole = _write_part(whole, _Part(part, offset, size * degree), dim)
            if arriving:
                results, arriving[number] = _barrier(results, arriving[number])
        parts = arriving
    dtypes = (jnp.result_type(shard, other) for other in others)
    return tuple(result.astype(dtype) for result, dtype in zip(results, dtypes, strict=True)), whole


def _add_part(einsum: Einsum, ring: DeviceRing, before: Array | None, part: _Part, other: Array) -> Array:
    """Return a result with one gathered part's matmul added to it.

    The matmul is written at the part's offset if the result has the ring's dim, else summed in float32. before: the
    result so far; None before the first part.
    """
    size = part.value.shape[einsum.left.index(ring.dim)]
    value = _multiply(einsum, part.value, _slice_dim(other, einsum.right, ring.dim, part.offset, size))
    if ring.dim not in einsum.out:
        return value if before is None else before + value
    value = value.astype(jnp.result_type(part.value, other))
    return _write_part(before, part._replace(value=value), einsum.out.index(ring.dim))


def _write_part(before: Array | None, part: _Part, dim: int) -> Array:
    before = _empty(part.value, dim, part.whole) if before is None else before
    return lax.dynamic_update_slice_in_dim(before, part.value, part.offset, dim)


def _empty(like: Array, dim: int, size: int) -> Array:
    return lax.full_like(like, 0, shape=(*like.shape[:dim], size, *like.shape[dim + 1 :]))


def _scatter(products: Sequence[_Product], ring: DeviceRing) -> Array:
    """Return this device's shard of a sum of matmuls, which is also summed over the devices of the ring.

    The partial sum of a device's shard starts on the next device, goes round the ring, and gets its last term on the
    device itself.
    """
    degree, place = lax.axis_size(ring.axes), lax.axis_index(ring.axes)
    size, dtype = _dim_size(products[0], ring) // degree, jnp.result_type(*products[0][1:])
    lanes = _lanes(size, ring)
    totals: list[Array] = []
    for hop in range(degree):
        arriving = [_permute(total.astype(dtype), lane, ring) for total, lane in zip(totals, lanes, strict=False)]
        terms = []
        for lane in lanes:
            offset = (place + lane.step * (degree - 1 - hop)) % degree * size + lane.start
            shares = [_partial_product(product, ring, offset, lane.size) for product in products]
            terms.append(sum(shares[1:], start=shares[0]))
        terms, arriving = _barrier(terms, arriving)
        totals = [term + sent for term, sent in zip(terms, arriving, strict=True)] if hop else terms
    return lax.concatenate(totals, products[0].einsum.out.index(ring.dim)).astype(dtype)


def _partial_product(product: _Product, ring: DeviceRing, offset: Array, size: int) -> Array:
    einsum, left, right = product
    return _multiply(
        einsum,
        _slice_dim(left, einsum.left, ring.dim, offset, size),
        _slice_dim(right, einsum.right, ring.dim, offset, size),
    )


def _multiply(einsum: Einsum, left: Array, right: Array) -> Array:
    """Return the einsum in float32, or in the operands' dtype if that is wider."""
    dtype = widest(jnp.result_type(left, right), jnp.float32)
    return jnp.einsum(einsum.formula, left, right, preferred_element_type=dtype)


def _slice_dim(value: Array, dims: str, dim: str, offset: Array, size: int) -> Array:
    """Return `size` elements of a dim from `offset`; the whole value if it lacks the dim."""
    return lax.dynamic_slice_in_dim(value, offset, size, dims.index(dim)) if dim in dims else value


def _barrier(left: Any, right: Any) -> tuple[Any, Any]:
    """Return both values, with an optimization barrier that keeps either from being used before the other is ready.

    Without it, XLA:GPU sends several shards in sequence before it multiplies the first, and XLA:TPU fuses the received
    sum into the matmul of the next term, which then waits for the transfer (JAX 0.10.2).
    """
    return lax.optimization_barrier((left, right))


def _permute(value: Array, lane: _Lane, ring: DeviceRing) -> Array:
    """Send each device's value to its neighbour in the lane's direction; return the value received."""
    # `lax.ppermute` numbers the devices in the order of the mesh, whatever the order of `axes` (JAX 0.10.2).
    axes = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in ring.axes)
    numbers = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(axis) for axis in axes])
    row = numbers.transpose([axes.index(axis) for axis in ring.axes]).ravel()
    return lax.ppermute(value, axes, list(zip(row.tolist(), np.roll(row, -lane.step).tolist(), strict=True)))


def _lanes(size: int, ring: DeviceRing) -> tuple[_Lane, ...]:
    """Return the lanes of a shard with `size` elements of the ring's dim: one, or a half in each direction."""
    forward = (size + 1) // 2 if ring.is_two_way else size
    lanes = (_Lane(0, forward, 1), _Lane(forward, size - forward, -1))
    return tuple(lane for lane in lanes if lane.size)


def _dim_size(product: _Product, ring: DeviceRing) -> int:
    einsum, left, right = product
    value, dims = (left, einsum.left) if ring.dim in einsum.left else (right, einsum.right)
    return value.shape[dims.index(ring.dim)]


def _parse_einsum(formula: str, dim: str, *, array: str) -> Einsum:
    """Parse an einsum. Raises if it cannot overlap, or if `array` (`left` or `out`) of it does not have `dim`."""
    if not can_overlap(formula, dim):
        raise MeshwrightError(
            f"{formula!r} cannot overlap over {dim!r}: it is an einsum of two arrays, each letter in two arrays or more"
        )
    inputs, _, out = formula.partition("->")
    left, right = inputs.split(",")
    einsum = Einsum(left, right, out)
    if dim not in getattr(einsum, array):
        raise MeshwrightError(f"dim {dim!r} is not in {getattr(einsum, array)!r} of {formula!r}")
    return einsum


def _as_tuple(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
