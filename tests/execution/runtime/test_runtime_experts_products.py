"""Products block by block are those of each expert's rows, whatever the routing."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.step.token_routing import expert_blocks
from meshwright.execution.runtime.experts.products import (
    _multiply_by_kernel,
    grouped_matmul,
    grouped_matmul_transposed,
)

ROWS, EXPERTS, D, F = 256, 4, 8, 12
"""Blocks of 16 rows."""

SIZES = [
    (64, 64, 64, 64),
    (256, 0, 0, 0),
    (0, 0, 0, 256),
    (1, 17, 33, 205),
    (0, 3, 0, 250),
    (15, 16, 17, 100),
    (0, 0, 0, 0),
    (0, 0, 5, 0),
]


def draw(*shape):
    """Small whole numbers, of which float32 sums are exact."""
    return np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32)


def slices(sizes):
    """The rows of each expert."""
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.fixture(scope="module")
def compiled():
    """Both products, which know sizes only as they run."""
    return jax.jit(partial(grouped_matmul, dtype=jnp.float32)), jax.jit(
        partial(grouped_matmul_transposed, dtype=jnp.float32)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_meet_the_weights_of_their_expert(sizes, compiled):
    """Rows beyond those of all experts may be anything."""
    rows, weights, gradient = draw(ROWS, D), draw(EXPERTS, D, F), draw(ROWS, F)
    rows[sum(sizes) :], gradient[sum(sizes) :] = np.nan, np.nan
    made, summed = compiled[0](rows, weights, np.array(sizes)), compiled[1](rows, gradient, np.array(sizes))
    for expert, own in enumerate(slices(sizes)):
        np.testing.assert_array_equal(made[own], rows[own] @ weights[expert])
        np.testing.assert_array_equal(summed[expert], rows[own].T @ gradient[own])


@pytest.mark.parametrize("sizes", [(10, 0, 20, 5), (40, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)], ids=str)
def test_the_kernel_for_gpus_multiplies_as_blocks_do(sizes):
    rows, weights = draw(40, 90), draw(EXPERTS, 90, 200)
    made = jax.jit(partial(_multiply_by_kernel, dtype=jnp.float32, interpret=True))(rows, weights, np.array(sizes))
    for expert, own in enumerate(slices(sizes)):
        np.testing.assert_array_equal(made[own], rows[own] @ weights[expert])


def test_sums_of_narrow_rows_are_rounded_once():
    """An expert's blocks add up in float32: 256 ones, and one bfloat16 cannot tell from 256."""
    ones = jnp.ones((512, 1), jnp.bfloat16).at[:, 0].set(1.0078125)
    run = jax.jit(partial(grouped_matmul_transposed, dtype=jnp.bfloat16))
    (summed,) = run(ones, jnp.ones_like(ones), jnp.array([512]))
    assert summed[0, 0] == 516


@pytest.mark.parametrize(("rows", "experts"), [(12, 3), (70, 2), (100, 3), (5, 6)])
def test_there_are_blocks_for_every_routing_and_no_more(rows, experts):
    count, size = expert_blocks(rows, experts)
    routings = (sizes for sizes in product(range(rows + 1), repeat=experts) if sum(sizes) <= rows)
    assert count == max(sum(-(-own // size) for own in sizes) for sizes in routings)


@pytest.mark.parametrize(
    ("rows", "experts", "size"), [(128, 8, 16), (4096, 8, 128), (16_384, 8, 512), (65_536, 8, 2048), (8, 1, 8)]
)
def test_a_block_is_a_quarter_of_an_experts_rows_within_bounds(rows, experts, size):
    assert expert_blocks(rows, experts)[1] == size
