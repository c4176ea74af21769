"""Products of experts in 8 bits: those of each expert rounded by itself, however its rows lie."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.execution.models.quantised.experts import expert_product
from meshwright.execution.models.quantised.products import FORMATS, multiply
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape

SIZES, D, F = np.array([3, 0, 5], np.int32), 16, 24
ROWS, WEIGHTS, COTANGENT = (
    np.random.default_rng(seed).standard_normal(shape, np.float32)
    for seed, shape in enumerate([(8, D), (3, D, F), (8, F)])
)
SLOTS = [(0, 0, 3), (2, 3, 8)]
"""The experts that have rows, with the first row of each and the one after its last."""


@pytest.fixture(autouse=True)
def mesh():
    """One device in context."""
    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        yield


def found(name, rows, cotangent, sizes):
    """The product, and the gradients of rows and weights."""

    def run(rows, weights, cotangent, sizes):
        made, pull = jax.vjp(lambda *given: expert_product(*given, sizes, name), rows, weights)
        return made, *pull(cotangent)

    return jax.jit(jax.shard_map(run, in_specs=P(), out_specs=P()))(rows, WEIGHTS, cotangent, sizes)


def by_hand(letters, left, right, formats):
    """The product of one expert."""
    if formats is None:
        return np.einsum(letters, left, right)
    return np.asarray(jax.jit(partial(multiply, letters, formats=formats, dtype=jnp.float32))(left, right))


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.matrix), "fp8"])
def test_rows_of_each_expert_are_rounded_and_multiplied_by_its_weights(name):
    """Rows beyond those of all experts, which may be anything, have no say; an expert without rows has no gradient."""
    beyond = partial(np.pad, pad_width=((0, 2), (0, 0)), constant_values=np.nan)
    made, of_rows, of_weights = found(name, beyond(ROWS), beyond(COTANGENT), SIZES)
    formats, close = FORMATS[name], partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for expert, start, stop in SLOTS:
        rows, cotangent = ROWS[start:stop], COTANGENT[start:stop]
        close(made[start:stop], by_hand("sd,df->sf", rows, WEIGHTS[expert], formats.forward))
        close(of_rows[start:stop], by_hand("sf,df->sd", cotangent, WEIGHTS[expert], formats.of_x))
        if name == "int8":
            close(of_weights[expert], rows.T @ cotangent)
    if name == "fp8":
        # Scales are of all rows at once; what each column of each expert has is within the rounding of both.
        wanted = [ROWS[a:b].T @ COTANGENT[a:b] for _, a, b in SLOTS]
        for (expert, *_), one in zip(SLOTS, wanted, strict=True):
            assert 0 < np.linalg.norm(of_weights[expert] - one) < (2**-4 + 2**-3) * np.linalg.norm(one)
    np.testing.assert_array_equal(of_weights[1], 0)


@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_slots_are_multiplied_as_rows_are(name):
    rows, cotangent = (np.stack([array[:3], array[:3], array[3:6]]) for array in (ROWS, COTANGENT))
    made, of_rows, of_weights = found(name, rows, cotangent, None)
    formats, close = FORMATS[name], partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for expert, weight in enumerate(WEIGHTS):
        close(made[expert], by_hand("sd,df->sf", rows[expert], weight, formats.forward))
        close(of_rows[expert], by_hand("sf,df->sd", cotangent[expert], weight, formats.of_x))
        close(of_weights[expert], by_hand("sd,sf->df", rows[expert], cotangent[expert], formats.of_weight))
