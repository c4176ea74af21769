"""The kernels of vendors, as far as they run without their hardware."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.attention.blockwise import Keys
from meshwright.execution.runtime.attention.kernels import (
    chunked_attention,
    full_sequence_attention,
    select_kernel,
    sequential_segments,
)
from meshwright.execution.runtime.attention.ring import zigzag
from meshwright.execution.runtime.attention.segments import Mask, Segments
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.mesh import MeshShape

CASES = {
    "causal": (Mask(), False, 64),
    "packed with a window": (Mask(window=100), True, 64),
    "packed, values of 32": (Mask(), True, 32),
    "every key": (Mask(causal=False), False, 64),
    "a window to both sides": (Mask(causal=False, window=60), False, 64),
    "chunks": (Mask(window=100, is_chunked=True), False, 64),
}


def inputs(*, packed=False, value_dim=64):
    """Queries, keys and values of 256 tokens, a gradient of the output, and places."""
    keys = zip(jax.random.split(jax.random.key(0), 4), (64, 64, value_dim, value_dim), strict=True)
    draws = [jax.random.normal(key, (1, 256, 1, 2, dim)) for key, dim in keys]
    positions = np.arange(256, dtype=np.int32)[None]
    starts = np.array([0, 90, 200])
    segments = (np.searchsorted(starts, positions, side="right") - 1).astype(np.int32)
    places = Segments(jnp.asarray(positions - starts[segments], jnp.int32), jnp.asarray(segments)) if packed else None
    return (draws[0], draws[1][:, :, :, 0], draws[2][:, :, :, 0]), draws[3], places


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "packed" in name else pytest.mark.matrix) for name in CASES]
)
def test_the_kernels_of_parts_interpreted_equal_block_by_block_in_any_order(name):
    mask, packed, value_dim = CASES[name]
    arrays, gradient, places = inputs(packed=packed, value_dim=value_dim)
    order = zigzag(256, 4)
    *arrays, gradient = (x[:, order] for x in (*arrays, gradient))
    places = jax.tree.map(lambda x: x[:, order], places or sequential_segments(256))

    @partial(jax.jit, static_argnums=0)
    def run(kernel):
        def attend(query, key, value):
            return chunked_attention(query, places, Keys(key, value, places), mask, kernel=kernel)

        output, back = jax.vjp(attend, *arrays)
        return output, *back(gradient)

    wanted = run("blockwise")
    with pltpu.force_tpu_interpret_mode():
        found = run("flash")
    assert np.abs(found[0] - wanted[0]).max() < 2e-6
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_splash_attention_interpreted_equals_block_by_block(name):
    mask, packed, value_dim = CASES[name]
    arrays, gradient, places = inputs(packed=packed, value_dim=value_dim)

    @partial(jax.jit, static_argnums=0)
    def run(kernel):
        output, back = jax.vjp(lambda *arrays: full_sequence_attention(*arrays, places, mask, kernel=kernel), *arrays)
        return output, *back(gradient)

    wanted = run("blockwise")
    with pltpu.force_tpu_interpret_mode():
        found = run("splash")
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def test_values_narrower_than_queries_reach_cudnn_with_zeros(monkeypatch):
    mask, _, value_dim = CASES["packed, values of 32"]
    arrays, _, _ = inputs(value_dim=value_dim)
    monkeypatch.setattr(jax.nn, "dot_product_attention", partial(_in_jax, jax.nn.dot_product_attention))
    found, wanted = (full_sequence_attention(*arrays, None, mask, kernel=kernel) for kernel in ("cudnn", "blockwise"))
    assert np.abs(found - wanted).max() < 2e-6


def _in_jax(attention, *arrays, implementation, **options):
    """JAX's attention without cuDNN, which needs a GPU."""
    assert implementation == "cudnn"
    return attention(*arrays, **options)


def test_a_kernel_that_the_device_has_not_is_one_clear_error():
    (query, _, _), _, places = inputs()
    with jax.set_mesh(build_mesh(MeshShape(dp=8))):
        assert select_kernel("flash", query, 256, places, Mask()) == "blockwise"
        with pytest.raises(MeshwrightError, match="devices are of kind cpu, not NVIDIA GPUs; use attention='flash'"):
            select_kernel("cudnn", query, 256, places, Mask())
