"""Collective matmul equals the plain product, forward and in both gradients, and sends nothing but permutes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.parser import parse_hlo
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.collective_matmul import all_gather_matmul, all_gather_matmuls, matmul_reduce_scatter

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from overlapped_matmul import schedule  # pyright: ignore[reportMissingImports]

TOLERANCE = 2e-6
"""Of the largest element: float32 sums of at most 24 x 24 products in another order."""

# The einsum, the ring's dim, and the dim of each operand and of the result that the ring's axis splits.
TENSOR_PARALLEL = [
    (all_gather_matmul, "sd,df->sf", "s", "sff"),
    (matmul_reduce_scatter, "sf,fd->sd", "s", "ffs"),
]
OTHERS = [
    (all_gather_matmul, "bsd,df->bsf", "s", "sff"),
    (all_gather_matmul, "df,sd->sf", "d", "dss"),  # the weights of FSDP: the gathered dim is summed
    (all_gather_matmul, "sd,df->fs", "s", "sff"),
    (all_gather_matmul, "bsd,bdf->bsf", "b", "bff"),
    (matmul_reduce_scatter, "bsf,fd->bsd", "s", "ffs"),
    (matmul_reduce_scatter, "sf,fd->ds", "d", "ffd"),
    (matmul_reduce_scatter, "bsf,bfd->bsd", "b", "ffb"),
]


def arrays_of(formula, size, dtype=np.float32):
    """Random arrays for the operands and the result of an einsum, every dim of one size."""
    draws = np.random.default_rng(0)
    return [draws.normal(size=[size] * len(letters)).astype(dtype) for letters in formula.replace("->", ",").split(",")]


def spec_of(letters, split, axes):
    """How an array lies: the dim named `split` over the axes."""
    return P(*(axes if letter == split else None for letter in letters))


def ring_of(case, mesh, *, is_two_way=True, axes="X", check_vma=True):
    """An overlapped product as a function of global arrays, and the specs of its operands and result."""
    call, formula, dim, split = case
    left, right, out = (
        spec_of(letters, letter, axes)
        for letters, letter in zip(formula.replace("->", ",").split(","), split, strict=True)
    )

    def local(left, right):
        return call(formula, left, right, axes=axes, dim=dim, is_two_way=is_two_way)

    ring = jax.shard_map(local, mesh=mesh, in_specs=(left, right), out_specs=out, check_vma=check_vma)
    return ring, (left, right, out)


def forward_and_gradients(function, left, right, weights):
    """The result, and the gradients of its sum with weights."""
    result, backward = jax.vjp(function, left, right)
    return result, *backward(weights)


def plain(formula, *arrays):
    """The same in float64 by NumPy: the gradient of an operand is a product of the weights and the other one."""
    left, right, out = (array.astype(np.float64) for array in arrays)
    one, other, result = formula.replace("->", ",").split(",")
    of_left = np.einsum(f"{result},{other}->{one}", out, right)
    return np.einsum(formula, left, right), of_left, np.einsum(f"{one},{result}->{other}", left, out)


def assert_equals_the_plain_product(case, mesh, size, **options):
    formula = case[1]
    ring, specs = ring_of(case, mesh, **options)
    full = arrays_of(formula, size)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(full, specs, strict=True)]
    found = jax.jit(lambda *xs: forward_and_gradients(ring, *xs))(*placed)
    for value, reference in zip(found, plain(formula, *full), strict=True):
        np.testing.assert_allclose(np.asarray(value), reference, rtol=0, atol=TOLERANCE * np.abs(reference).max())


def mesh_of(degree):
    return jax.make_mesh((degree,), ("X",), devices=jax.devices()[:degree])


@pytest.mark.parametrize("is_two_way", [True, False])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=lambda case: case[0].__name__)
def test_a_ring_of_any_size_equals_the_plain_product(case, degree, is_two_way):
    """Shards of 3 rows: the two ways carry 2 and 1."""
    assert_equals_the_plain_product(case, mesh_of(degree), 3 * degree, is_two_way=is_two_way)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0].__name__} {case[1]} over {case[2]}")
def test_any_einsum_equals_the_plain_product(case):
    assert_equals_the_plain_product(case, mesh_of(4), 8)


@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=lambda case: case[0].__name__)
def test_a_shard_of_one_row_travels_one_way(case):
    assert_equals_the_plain_product(case, mesh_of(5), 5)


@pytest.mark.parametrize("axes", [("X", "Y"), ("Y", "X")])
@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=lambda case: case[0].__name__)
def test_a_ring_may_go_over_several_axes_in_any_order(case, axes):
    """`lax.ppermute` numbers devices in the mesh's order, whatever order of axes it is given."""
    assert_equals_the_plain_product(case, jax.make_mesh((2, 4), ("X", "Y")), 16, axes=axes)


@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=lambda case: case[0].__name__)
def test_types_need_not_be_checked(case):
    assert_equals_the_plain_product(case, mesh_of(4), 8, check_vma=False)


def test_an_operand_that_every_device_holds_gets_the_sum_of_its_gradients():
    mesh, (x, w, _) = mesh_of(4), arrays_of("sd,df->sf", 8)

    def local(shard, w):
        return all_gather_matmul("sd,df->sf", shard, w, axes="X", dim="s")[None]

    ring = jax.shard_map(local, mesh=mesh, in_specs=(P("X"), P()), out_specs=P("X"))
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("X"))), jax.device_put(w, jax.NamedSharding(mesh, P()))
    of_w = jax.jit(jax.grad(lambda x, w: ring(x, w).sum(), argnums=1))(*placed)
    np.testing.assert_allclose(np.asarray(of_w), 4 * x.sum(0)[:, None].repeat(8, axis=1), rtol=1e-5, atol=1e-5)


def test_sums_of_bf16_products_are_float32():
    """256 and seven ones: added one by one in bf16, whose neighbours of 256 are 255 and 258, they would stay 256."""
    mesh = mesh_of(8)
    weights, x = jnp.ones((8, 1), jnp.bfloat16).at[0].set(256), jnp.ones((1, 8), jnp.bfloat16)
    ring = jax.shard_map(
        lambda w, x: all_gather_matmul("df,sd->sf", w, x, axes="X", dim="d", is_two_way=False)[None],
        mesh=mesh,
        in_specs=(P("X"), P()),
        out_specs=P("X"),
    )
    placed = [jax.device_put(v, jax.NamedSharding(mesh, s)) for v, s in ((weights, P("X")), (x, P()))]
    found = jax.jit(ring)(*placed)
    assert found.dtype == jnp.bfloat16
    assert np.asarray(found, np.float32).ravel().tolist() == [264.0] * 8  # 263, rounded once


@pytest.mark.parametrize("is_two_way", [True, False])
@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=lambda case: case[0].__name__)
def test_only_permutes_are_compiled_and_they_send_what_the_collective_would(case, is_two_way):
    mesh, size = mesh_of(4), 16
    ring, specs = ring_of(case, mesh, is_two_way=is_two_way)
    arrays = [jax.ShapeDtypeStruct((size, size), np.float32, sharding=jax.NamedSharding(mesh, s)) for s in specs[:2]]
    hlo = jax.jit(ring).lower(*arrays).compile().as_text()
    found = read_collectives(parse_hlo(hlo or ""), {"X": 4}).collectives
    assert {collective.kind for collective in found} == {"collective-permute"}
    assert len(found) == (6 if is_two_way else 3)
    assert sum(collective.bytes for collective in found) == 4 * size * size * 3 // 4


def test_products_of_one_shard_share_its_ring_forward_and_backward():
    """The shard goes round once for all, and so does the sum of its gradients."""
    mesh, (x, w, _) = mesh_of(4), arrays_of("sd,df->sf", 8)
    others = (w, 2 * w, w[:, ::-1].copy())

    def local(shard, *others):
        return all_gather_matmuls(("sd,df->sf",) * 3, shard, others, axes="X", dim="s", is_two_way=False)

    split = P(None, "X")
    ring = jax.shard_map(local, mesh=mesh, in_specs=(P("X"), *[split] * 3), out_specs=(split,) * 3)
    placed = [
        jax.device_put(v, jax.NamedSharding(mesh, s)) for v, s in zip((x, *others), (P("X"), *[split] * 3), strict=True)
    ]

    def both(*arrays):
        results, backward = jax.vjp(ring, *arrays)
        return results, backward(results)

    compiled = jax.jit(both).lower(*placed).compile()
    found = read_collectives(parse_hlo(compiled.as_text() or ""), {"X": 4}).collectives
    assert [(move.kind, move.bytes) for move in found] == [("collective-permute", 4 * 2 * 8)] * 6
    results, (of_shard, *of_others) = compiled(*placed)
    for result, other, of_other in zip(results, others, of_others, strict=True):
        np.testing.assert_allclose(np.asarray(result), x @ other, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(np.asarray(of_other), x.T @ (x @ other), rtol=1e-5, atol=1e-3)
    wanted = sum(x @ other @ other.T for other in others)
    np.testing.assert_allclose(np.asarray(of_shard), wanted, rtol=1e-5, atol=1e-3)


MISTAKES = [
    ("sd,df", "s", "cannot overlap"),
    ("sd,df->s", "s", "each letter in two arrays"),
    ("sd,df->sf", "x", "cannot overlap over 'x'"),
    ("sd,df->sf", "f", "dim 'f' is not in 'sd'"),
]


@pytest.mark.parametrize(("formula", "dim", "message"), MISTAKES)
def test_an_einsum_that_cannot_overlap_is_one_clear_error(formula, dim, message):
    with pytest.raises(MeshwrightError, match=message):
        all_gather_matmul(formula, jnp.ones((2, 2)), jnp.ones((2, 2)), axes="X", dim=dim)


def test_a_dim_that_the_ring_cannot_share_out_is_an_error():
    mesh = mesh_of(4)
    ring, specs = ring_of((matmul_reduce_scatter, "sf,fd->sd", "s", "ffs"), mesh)
    arrays = [
        jax.device_put(jnp.ones((6, 4)), jax.NamedSharding(mesh, specs[0])),
        jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, specs[1])),
    ]
    with pytest.raises(MeshwrightError, match="size 6, no multiple of the 4 devices"):
        jax.eval_shape(ring, *arrays)


COMPILED = [pytest.param("v5e:4x4", "two ways", marks=pytest.mark.matrix), ("h100:8", "one way")]


@pytest.mark.slow
@pytest.mark.parametrize("product", ["gather", "scatter"])
@pytest.mark.parametrize(("on", "form"), COMPILED)
def test_every_permute_is_asynchronous_and_has_a_product_to_hide_behind(on, form, product):
    found = schedule(on, product, "forward", form)
    assert not found.synchronous
    assert found.between
    assert all(kind == "collective-permute" and products > 0 for kind, products in found.between)


@pytest.mark.slow
@pytest.mark.parametrize("product", ["gather", "scatter"])
def test_backward_overlaps_as_well(product):
    found = schedule("h100:8", product, "both", "one way")
    assert (found.hidden, found.synchronous) == (len(found.between), ())
    assert len(found.between) >= 14
