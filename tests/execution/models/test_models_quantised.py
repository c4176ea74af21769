"""Products in 8 bits: equal to rounding by hand, as near as their formats allow, and the same on a mesh."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.product import product
from meshwright.execution.models.quantised.products import FORMATS, multiply
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape

X, WEIGHT, COTANGENT = (
    np.random.default_rng(seed).standard_normal(shape, np.float32)
    for seed, shape in enumerate([(4, 8, 64), (64, 2, 3, 16), (4, 8, 2, 3, 16)])
)
# The largest of each slice is such that int8's scales are powers of two: whoever divides, however, finds them.
X[..., 0], WEIGHT[0] = 127.5 / 16, -127.5 / 16
LETTERS = "bsd,dkgh->bskgh"
E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = {"int8": 127.5, "fp8": float(ml_dtypes.finfo(E4M3).max)}
"""What the largest value of a slice becomes: half of int8's last step is within it, as in qwix."""


def multiplied(x, weight, name):
    """The product in float32, compiled."""
    return by_formats(LETTERS, x, weight, FORMATS[name].forward)


def by_formats(letters, left, right, formats):
    return jax.jit(partial(multiply, letters, formats=formats, dtype=jnp.float32))(left, right)


@pytest.fixture(autouse=True)
def mesh():
    """Four devices, fsdp=2 and tp=2, in context."""
    with jax.set_mesh(build_mesh(MeshShape(fsdp=2, tp=2), jax.devices()[:4])):
        yield


def scale(array, dims, name):
    """The scale of each slice along some dims."""
    return np.abs(array).max(axis=dims, keepdims=True) / np.float32(LARGEST[name])


def rounded(array, dims, name):
    """An array rounded to 8 bits by hand."""
    each = scale(array, dims, name)
    if name == "fp8":
        return (array / each).astype(E4M3).astype(np.float32) * each
    return np.clip(np.round(array / each), -128, 127) * each


def error(array, dims, name):
    """How far rounding may move each element: half a step of int8, half a unit in the last place of e4m3."""
    each = scale(array, dims, name)
    # Of e4m3: 3 bits of mantissa, and 2^-9 as its smallest number.
    return np.maximum(np.abs(array) * 2.0**-4, each * 2.0**-10) if name == "fp8" else np.full_like(array, 0.5) * each


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_operands_rounded_by_hand(name):
    found = multiplied(X, WEIGHT, name)
    wanted = np.einsum(LETTERS, rounded(X, 2, name), rounded(WEIGHT, 0, name))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_as_near_as_its_format_allows(name):
    found = multiplied(X, WEIGHT, name)
    of_x, of_weight = error(X, 2, name), error(WEIGHT, 0, name)
    allowed = np.einsum(LETTERS, of_x, np.abs(WEIGHT) + of_weight) + np.einsum(LETTERS, np.abs(X), of_weight)
    off = np.abs(found - np.einsum(LETTERS, X, WEIGHT))
    assert (off <= allowed).all()
    assert off.max() > 0.01 * allowed.max()  # It is rounded, and not by much less than it may be.


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_whose_summed_dims_are_whole_is_the_same_on_a_mesh(name):
    x, weight = jax.device_put(X, P("fsdp")), jax.device_put(WEIGHT, P(None, "tp"))
    run = jax.jit(lambda x, weight: product(LETTERS, x, weight, matmul_dtype=name))
    wanted = multiplied(X, WEIGHT, name)
    if name == "int8":
        np.testing.assert_array_equal(run(x, weight), wanted)  # Summed in int32, in whichever order.
    else:
        np.testing.assert_allclose(run(x, weight), wanted, rtol=1e-5, atol=1e-4)
    assert "all-" not in run.lower(x, weight).compile().as_text()


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.matrix), "fp8"])
def test_each_part_of_a_split_summed_dim_has_scales_of_its_own(name):
    """Two halves of d, each rounded by itself and multiplied back before they are summed."""
    x, weight = jax.device_put(X, P("fsdp", None, "tp")), jax.device_put(WEIGHT, P("tp"))

    def run(x, weight):
        added = product(LETTERS, x, weight, matmul_dtype=name, out_sharding=P("fsdp", unreduced={"tp"}))
        return jax.reshard(added, P("fsdp"))

    halves = zip(np.split(X, 2, axis=2), np.split(WEIGHT, 2, axis=0), strict=True)
    wanted = sum(multiplied(*half, name) for half in halves)
    np.testing.assert_allclose(jax.jit(run)(x, weight), wanted, rtol=1e-5, atol=1e-4)


def gradients(name):
    """Those of x and the weight."""

    @jax.jit
    def run(x, weight, cotangent):
        return jax.vjp(lambda x, weight: product(LETTERS, x, weight, matmul_dtype=name), x, weight)[1](cotangent)

    return run(X, WEIGHT, COTANGENT)


@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_backward_rounds_what_its_formats_say(name):
    formats = FORMATS[name]
    of_x, of_weight = gradients(name)
    wanted = by_formats("bskgh,dkgh->bsd", COTANGENT, WEIGHT, formats.of_x)
    np.testing.assert_array_equal(of_x, wanted)
    if formats.of_weight is None:
        np.testing.assert_array_equal(of_weight, gradients(None)[1])
    else:
        wanted = by_formats("bsd,bskgh->dkgh", X, COTANGENT, formats.of_weight)
        np.testing.assert_array_equal(of_weight, wanted)


def test_without_qwix_one_line_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(MeshwrightError, match=r"pip install meshwright\[quantized\]"):
        multiplied(X, WEIGHT, "int8")


def test_where_they_do_not_run_is_told():
    with pytest.raises(MeshwrightError, match="matmuls overlapped over tp=2; use collective_matmul=False"):
        check_runnable(PRESETS["tiny"], MeshShape(tp=2), Strategy(matmul_dtype="fp8", collective_matmul=True))
