"""Collective matmul: products that overlap with their own collective, as rings of permutes under `shard_map`.

`gather_product` is an all-gather and then a product, a shard at a time: while one shard is multiplied, the next is on
its way. `product_scatter` is a product and then a reduce-scatter, a share at a time: while the sum of one share is on
its way, the next term of it is multiplied. Each is the transpose of the other, so backward overlaps as well.

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
from meshwright.runtime.shards import alike

BROUGHT = "brought by a ring"
"""The name of what a ring has gathered, by which a remat policy keeps it for backward; else it is gathered again."""


@dataclass(frozen=True)
class Ring:
    """The devices along some mesh axes in a row that closes, and the dim, a letter of the einsum, split over them.

    is_two_way: each shard travels in halves, one each way, so that both links of a device carry half.
    """

    axes: tuple[str, ...]
    dim: str
    is_two_way: bool


@dataclass(frozen=True)
class Einsum:
    """The letters of an einsum of two arrays."""

    left: str
    right: str
    out: str

    @property
    def formula(self) -> str:
        """As `jnp.einsum` wants it."""
        return f"{self.left},{self.right}->{self.out}"


@dataclass(frozen=True)
class _Lane:
    """A part of each shard, from `start` on, and the way it travels: to the next device (+1) or the one before (-1)."""

    start: int
    size: int
    step: int


class _Part(NamedTuple):
    """A part of a gathered dim, or the product with it; where it begins, and the size of that dim."""

    value: Array
    offset: Array
    whole: int


class _Product(NamedTuple):
    """A product that is yet to be multiplied."""

    einsum: Einsum
    left: Array
    right: Array


def gather_product(
    formula: str, shard: Array, other: Array, *, axes: str | tuple[str, ...], dim: str, is_two_way: bool = True
) -> Array:
    """`einsum(formula, all_gather(shard), other)`: `dim` of the first operand is split over the mesh axes.

    To be called under `shard_map`. Products and sums are float32, the result has the operands' dtype. is_two_way: half
    of each shard goes each way, for the two links of a torus axis; on a switch one way does. Raises unless every letter
    of the formula is in two of its three arrays, or in all. Backward reads what was gathered (`BROUGHT`).
    """
    (result,) = gather_products((formula,), shard, (other,), axes=axes, dim=dim, is_two_way=is_two_way)
    return result


def gather_products(
    formulas: Sequence[str],
    shard: Array,
    others: Sequence[Array],
    *,
    axes: str | tuple[str, ...],
    dim: str,
    is_two_way: bool = True,
) -> tuple[Array, ...]:
    """The `gather_product` of one shard with each of several arrays: it goes round once, and so does its gradient.

    The letters of the shard are the same in all formulas.
    """
    ring = Ring(_as_tuple(axes), dim, is_two_way)
    einsums = tuple(_read(formula, dim, of="left") for formula in formulas)
    shard, *others = alike(shard, *others, axes=ring.axes)
    return _gather_products(einsums, ring, shard, tuple(others))


def product_scatter(
    formula: str, left: Array, right: Array, *, axes: str | tuple[str, ...], dim: str, is_two_way: bool = True
) -> Array:
    """`psum_scatter(einsum(formula, left, right))`: each device is left its share of `dim`, summed over the mesh axes.

    As `gather_product`. What travels is in the operands' dtype, as in the reduce-scatter of the plain product.
    """
    ring = Ring(_as_tuple(axes), dim, is_two_way)
    einsum = _read(formula, dim, of="out")
    left, right = alike(left, right, axes=ring.axes)
    size, degree = _size(_Product(einsum, left, right), ring), lax.axis_size(ring.axes)
    if size % degree:
        raise MeshwrightError(
            f"dim {dim} of {formula} has size {size}, no multiple of the {degree} devices of the ring"
        )
    return _product_scatter(einsum, ring, left, right)


def can_overlap(formula: str, dim: str) -> bool:
    """Whether `gather_product` and `product_scatter` take a formula and a dim of it."""
    inputs, _, out = formula.partition("->")
    arrays = [*inputs.split(","), out]
    return len(arrays) == 3 and dim in inputs and all(sum(d in a for a in arrays) > 1 for d in formula if d.isalpha())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_products(
    einsums: tuple[Einsum, ...], ring: Ring, shard: Array, others: tuple[Array, ...]
) -> tuple[Array, ...]:
    """`gather_products`, with its backward."""
    return _gather(einsums, ring, shard, others)[0]


def _gather_products_forward(
    einsums: tuple[Einsum, ...], ring: Ring, shard: Array, others: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, tuple[Array, ...]]]:
    """The results, and for backward what was gathered and the other operands."""
    products, whole = _gather(einsums, ring, shard, others)
    return products, (checkpoint_name(whole, BROUGHT), others)


def _gather_products_backward(
    einsums: tuple[Einsum, ...], ring: Ring, kept: tuple[Array, tuple[Array, ...]], gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """The gradient of the shard is a `product_scatter` of a sum of products; the others communicate nothing."""
    whole, others = kept
    # Else XLA makes each part of a gradient again, and cuts the parts out of the sum that it may be a share of.
    gradients = lax.optimization_barrier(gradients)
    found = list(zip(einsums, gradients, others, strict=True))
    of_shard = _scatter(
        [_Product(Einsum(e.out, e.right, e.left), gradient, other) for e, gradient, other in found], ring
    )
    of_others = (_multiply(Einsum(e.left, e.out, e.right), whole, gradient) for e, gradient, _ in found)
    return of_shard, tuple(value.astype(other.dtype) for value, other in zip(of_others, others, strict=True))


_gather_products.defvjp(_gather_products_forward, _gather_products_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product_scatter(einsum: Einsum, ring: Ring, left: Array, right: Array) -> Array:
    """`product_scatter`, with its backward."""
    return _scatter([_Product(einsum, left, right)], ring)


def _product_scatter_forward(
    einsum: Einsum, ring: Ring, left: Array, right: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The result, and the operands for backward."""
    return _product_scatter(einsum, ring, left, right), (left, right)


def _product_scatter_backward(
    einsum: Einsum, ring: Ring, kept: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """The gradient of the left is a `gather_product`; that of the right communicates nothing once that is done."""
    left, right = kept
    (of_left,), whole = _gather((Einsum(einsum.out, einsum.right, einsum.left),), ring, gradient, (right,))
    of_right = _multiply(Einsum(einsum.left, einsum.out, einsum.right), left, whole)
    return of_left.astype(left.dtype), of_right.astype(right.dtype)


_product_scatter.defvjp(_product_scatter_forward, _product_scatter_backward)


def _gather(
    einsums: tuple[Einsum, ...], ring: Ring, shard: Array, others: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    """The products of what the ring gathers, the first operand of each einsum, with other arrays; and what it gathers.

    After `hop` hops a lane that travels forward brings the shard of the device so many places before.
    """
    degree, place = lax.axis_size(ring.axes), lax.axis_index(ring.axes)
    dim = einsums[0].left.index(ring.dim)
    size = shard.shape[dim]
    lanes = _lanes(size, ring)
    parts = [lax.slice_in_dim(shard, lane.start, lane.start + lane.size, axis=dim) for lane in lanes]
    results: list[Any] = [None] * len(einsums)
    whole = _empty(shard, dim, size * degree)
    for hop in range(degree):
        coming = [_pass_on(part, lane, ring) for part, lane in zip(parts, lanes, strict=True) if hop < degree - 1]
        for number, (part, lane) in enumerate(zip(parts, lanes, strict=True)):
            offset = (place - hop * lane.step) % degree * size + lane.start
            results = [
                _more(einsum, ring, before, _Part(part, offset, size * degree), other)
                for einsum, before, other in zip(einsums, results, others, strict=True)
            ]
            whole = _put(whole, _Part(part, offset, size * degree), dim)
            if coming:
                results, coming[number] = _together(results, coming[number])
        parts = coming
    dtypes = (jnp.result_type(shard, other) for other in others)
    return tuple(result.astype(dtype) for result, dtype in zip(results, dtypes, strict=True)), whole


def _more(einsum: Einsum, ring: Ring, before: Array | None, part: _Part, other: Array) -> Array:
    """The product with the parts of the gathered dim so far, and with one more: put in its place, or added in float32.

    A product is put in place before the ring goes on, so that compilers write it there at once.
    """
    size = part.value.shape[einsum.left.index(ring.dim)]
    value = _multiply(einsum, part.value, _cut(other, einsum.right, ring.dim, part.offset, size))
    if ring.dim not in einsum.out:
        return value if before is None else before + value
    value = value.astype(jnp.result_type(part.value, other))
    return _put(before, part._replace(value=value), einsum.out.index(ring.dim))


def _put(before: Array | None, part: _Part, dim: int) -> Array:
    """An array with one more part of a dim in its place."""
    before = _empty(part.value, dim, part.whole) if before is None else before
    return lax.dynamic_update_slice_in_dim(before, part.value, part.offset, dim)


def _empty(like: Array, dim: int, size: int) -> Array:
    """An array like another, with another size of a dim."""
    return lax.full_like(like, 0, shape=(*like.shape[:dim], size, *like.shape[dim + 1 :]))


def _scatter(products: Sequence[_Product], ring: Ring) -> Array:
    """The share of this device of the sum of products, summed over the ring too.

    A lane's sum for a device begins at the device after it, goes round, and gets its last term where it belongs.
    """
    degree, place = lax.axis_size(ring.axes), lax.axis_index(ring.axes)
    size, dtype = _size(products[0], ring) // degree, jnp.result_type(*products[0][1:])
    lanes = _lanes(size, ring)
    totals: list[Array] = []
    for hop in range(degree):
        coming = [_pass_on(total.astype(dtype), lane, ring) for total, lane in zip(totals, lanes, strict=False)]
        terms = []
        for lane in lanes:
            offset = (place + lane.step * (degree - 1 - hop)) % degree * size + lane.start
            shares = [_share(product, ring, offset, lane.size) for product in products]
            terms.append(sum(shares[1:], start=shares[0]))
        terms, coming = _together(terms, coming)
        totals = [term + sent for term, sent in zip(terms, coming, strict=True)] if hop else terms
    return lax.concatenate(totals, products[0].einsum.out.index(ring.dim)).astype(dtype)


def _share(product: _Product, ring: Ring, offset: Array, size: int) -> Array:
    """The part of a product from `offset` of the ring's dim on."""
    einsum, left, right = product
    return _multiply(
        einsum, _cut(left, einsum.left, ring.dim, offset, size), _cut(right, einsum.right, ring.dim, offset, size)
    )


def _multiply(einsum: Einsum, left: Array, right: Array) -> Array:
    """The product, in float32 at least."""
    dtype = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
    return jnp.einsum(einsum.formula, left, right, preferred_element_type=dtype)


def _cut(value: Array, dims: str, dim: str, offset: Array, size: int) -> Array:
    """The part of a value from `offset` of a dim on; all of one without that dim."""
    return lax.dynamic_slice_in_dim(value, offset, size, dims.index(dim)) if dim in dims else value


def _together(left: Any, right: Any) -> tuple[Any, Any]:
    """Both values, neither to be used before the other is there.

    Else XLA for GPUs sends several shards one after the other before it multiplies the first, and XLA for TPUs adds
    what arrives to a term inside the very fusion that computes the term, which then waits for it (JAX 0.10.2).
    """
    return lax.optimization_barrier((left, right))


def _pass_on(value: Array, lane: _Lane, ring: Ring) -> Array:
    """What the neighbour sends when every device sends its value on."""
    # `lax.ppermute` numbers the devices in the order of the mesh, whatever that of its axes (JAX 0.10.2).
    axes = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in ring.axes)
    numbers = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(axis) for axis in axes])
    row = numbers.transpose([axes.index(axis) for axis in ring.axes]).ravel()
    return lax.ppermute(value, axes, list(zip(row.tolist(), np.roll(row, -lane.step).tolist(), strict=True)))


def _lanes(size: int, ring: Ring) -> tuple[_Lane, ...]:
    """The lanes of a shard of some size: the whole of it forward, or a half each way."""
    forward = (size + 1) // 2 if ring.is_two_way else size
    lanes = (_Lane(0, forward, 1), _Lane(forward, size - forward, -1))
    return tuple(lane for lane in lanes if lane.size)


def _size(product: _Product, ring: Ring) -> int:
    """The size of the ring's dim in the product."""
    einsum, left, right = product
    value, dims = (left, einsum.left) if ring.dim in einsum.left else (right, einsum.right)
    return value.shape[dims.index(ring.dim)]


def _read(formula: str, dim: str, *, of: str) -> Einsum:
    """The einsum that a formula is, checked."""
    if not can_overlap(formula, dim):
        raise MeshwrightError(
            f"{formula!r} cannot overlap over {dim!r}: it is an einsum of two arrays, each letter in two arrays or more"
        )
    inputs, _, out = formula.partition("->")
    left, right = inputs.split(",")
    einsum = Einsum(left, right, out)
    if dim not in getattr(einsum, of):
        raise MeshwrightError(f"dim {dim!r} is not in {getattr(einsum, of)!r} of {formula!r}")
    return einsum


def _as_tuple(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """One axis, or several, as several."""
    return (axes,) if isinstance(axes, str) else tuple(axes)
