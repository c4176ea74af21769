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

MASKS = {
    "causal": (Mask(), False),
    "packed with a window": (Mask(window=100), True),
    "every key": (Mask(causal=False), False),
    "a window to both sides": (Mask(causal=False, window=60), False),
    "chunks": (Mask(window=100, is_chunked=True), False),
}


def inputs(*, packed):
    """Queries, keys and values of 256 tokens, a gradient of the output, and places."""
    shape = (1, 256, 1)
    draws = [jax.random.normal(key, (*shape, 2, 64)) for key in jax.random.split(jax.random.key(0), 4)]
    positions = np.arange(256, dtype=np.int32)[None]
    starts = np.array([0, 90, 200])
    segments = (np.searchsorted(starts, positions, side="right") - 1).astype(np.int32)
    places = Segments(jnp.asarray(positions - starts[segments], jnp.int32), jnp.asarray(segments)) if packed else None
    return (draws[0], draws[1][:, :, :, 0], draws[2][:, :, :, 0]), draws[3], places


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "packed" in name else pytest.mark.matrix) for name in MASKS]
)
def test_the_kernels_of_parts_interpreted_equal_block_by_block_in_any_order(name):
    mask, packed = MASKS[name]
    arrays, gradient, places = inputs(packed=packed)
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
@pytest.mark.parametrize("name", MASKS)
def test_splash_attention_interpreted_equals_block_by_block(name):
    mask, packed = MASKS[name]
    arrays, gradient, places = inputs(packed=packed)

    @partial(jax.jit, static_argnums=0)
    def run(kernel):
        output, back = jax.vjp(lambda *arrays: full_sequence_attention(*arrays, places, mask, kernel=kernel), *arrays)
        return output, *back(gradient)

    wanted = run("blockwise")
    with pltpu.force_tpu_interpret_mode():
        found = run("splash")
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def test_a_kernel_that_the_device_has_not_is_one_clear_error():
    (query, _, _), _, places = inputs(packed=False)
    with jax.set_mesh(build_mesh(MeshShape(dp=8))):
        assert select_kernel("flash", query, 256, places, Mask()) == "blockwise"
        with pytest.raises(MeshwrightError, match="devices are of kind cpu, not NVIDIA GPUs; use attention='flash'"):
            select_kernel("cudnn", query, 256, places, Mask())
