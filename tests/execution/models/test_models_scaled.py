"""Matmuls with weights in int8, int4 and fp8 beside those with the dequantised weights, in float32."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.execution.models.quantised import scaled_products
from meshwright.execution.models.quantised.scaled import ScaledWeight, dequantised, in_int4, packed, quantise, unpacked
from meshwright.execution.models.quantised.scaled_kernel import fits_scaled_kernel, multiply_scaled_blocks
from meshwright.execution.models.quantised.scaled_products import (
    group_products,
    masked_product,
    matrix_product,
    scaled_expert_product,
)


def drawn(dtype, *, experts, groups, group, columns, has_zero=False):
    """Weights of experts in a format, and their numbers [experts, inputs, columns]."""
    draw = np.random.default_rng(0)
    values, scale = quantise(draw.standard_normal((experts, groups, group, columns)).astype(np.float32), dtype)
    zero = draw.integers(-8, 8, scale.shape).astype(np.int8) if has_zero else None
    weight = ScaledWeight(*map(_on_device, (values, scale, zero)), (("embed", groups * group),), (("mlp", columns),))
    return weight, np.asarray(dequantised(weight, jnp.float32)).reshape(experts, -1, columns)


def _on_device(array):
    return None if array is None else jnp.asarray(array)


def drawn_rows(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def check(found, wanted):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


CASES = [("int4", 5, 64, False), ("int4", 3, 128, True), ("fp8", 3, 32, False), ("int8", 1, 96, False)]


@pytest.mark.parametrize(("dtype", "groups", "group", "has_zero"), CASES)
def test_products_of_groups_are_those_of_the_dequantised_weight(dtype, groups, group, has_zero):
    weights, numbers = drawn(dtype, experts=1, groups=groups, group=group, columns=40, has_zero=has_zero)
    rows = drawn_rows(7, groups * group)
    one = jax.tree.map(lambda array: array[0], weights)
    check(group_products(rows, one, jnp.float32), rows @ numbers[0])
    if dtype == "int4":  # As TPUs store them.
        wide = replace(one, values=unpacked(one.values).astype(jnp.int4))
        check(group_products(rows, wide, jnp.float32), rows @ numbers[0])


@pytest.mark.parametrize("count", [7, 20])
@pytest.mark.parametrize(("dtype", "groups", "group", "has_zero"), CASES)
def test_products_on_tpus_are_those_of_the_dequantised_weight(dtype, groups, group, has_zero, count, monkeypatch):
    monkeypatch.setattr(scaled_products, "mesh_platform", lambda: "tpu")
    weights, numbers = drawn(dtype, experts=1, groups=groups, group=group, columns=40, has_zero=has_zero)
    rows = drawn_rows(count, groups * group)
    check(matrix_product(rows, jax.tree.map(lambda array: array[0], weights), jnp.float32), rows @ numbers[0])


@pytest.mark.parametrize(("dtype", "groups", "group", "has_zero"), CASES)
def test_the_gpu_kernel_multiplies_blocks_of_rows_by_their_experts_weights(dtype, groups, group, has_zero):
    weights, numbers = drawn(dtype, experts=3, groups=groups, group=group, columns=100, has_zero=has_zero)
    rows, sizes = drawn_rows(50, groups * group), [11, 0, 33]
    assert fits_scaled_kernel(20, weights)
    blocks = np.array([[0, 0, 11], [2, 11, 31], [2, 31, 44], [0, 0, 0]])
    made = jax.jit(partial(multiply_scaled_blocks, size=20, interpret=True))(rows, weights, blocks)
    check(made[:44], np.einsum("mk,mkn->mn", rows[:44], numbers[np.repeat(np.arange(3), sizes)]))


def test_the_kernel_is_not_for_many_rows():
    weights, _ = drawn("int4", experts=1, groups=2, group=64, columns=8)
    assert [fits_scaled_kernel(64, weights), fits_scaled_kernel(65, weights)] == [True, False]


@pytest.mark.parametrize("multiply", [scaled_expert_product, masked_product])
def test_sorted_rows_are_multiplied_by_their_experts_weights(multiply):
    weights, numbers = drawn("int4", experts=4, groups=2, group=16, columns=24, has_zero=True)
    sizes = np.array([5, 0, 9, 2])
    rows = drawn_rows(20, 32)
    with jax.set_mesh(jax.make_mesh((1,), ("tp",))):
        made = jax.jit(multiply)(rows, weights, jnp.asarray(sizes))
    expert = np.repeat(np.arange(4), sizes)
    check(made[:16], np.einsum("mk,mkn->mn", rows[:16], numbers[expert]))


def test_slots_of_experts_are_multiplied_by_their_weights():
    weights, numbers = drawn("int4", experts=3, groups=2, group=16, columns=24)
    rows = drawn_rows(3, 4, 32)
    check(scaled_expert_product(rows, weights, None), np.einsum("esk,ekn->esn", rows, numbers))


def test_two_values_of_a_byte_are_both_read():
    values = np.random.default_rng(0).integers(-8, 8, (4, 10, 6)).astype(np.int8)
    np.testing.assert_array_equal(unpacked(jnp.asarray(packed(values))), values)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        stored = jax.device_put(packed(values), jax.NamedSharding(mesh, jax.P("tp")))
        wide = in_int4(ScaledWeight(stored, None, None, (), ()))
    assert wide.values.dtype == jnp.int4
    np.testing.assert_array_equal(np.asarray(wide.values).astype(np.int8), values)
