"""Attention over pages by the kernels for GPUs and TPUs, interpreted here: what a gather of the pages gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.execution.models.attention import Scoring
from meshwright.execution.models.generation.paged_cache import Pages, TokenSizes, read_pages
from meshwright.execution.models.generation.paged_kernel import attend_to_pages, fits_kernel
from meshwright.execution.models.generation.paged_kernel_tpu import attend_to_pages_on_tpu, fits_tpu_kernel

BATCH, HEADS, LAYERS, ENTRIES, SLOTS = 3, 2, 2, 21, 16


def drawn_pages(random, sizes, *, is_int8, lanes):
    """Rows end in padding that attention must not read."""
    pages, width = (LAYERS, BATCH * ENTRIES, SLOTS), sizes.heads * sizes.of_head

    def padded(array):
        return np.pad(array, [(0, 0)] * 3 + [(0, -array.shape[3] % lanes)])

    if not is_int8:
        return Pages(padded(random.standard_normal((*pages, width), np.float32)))
    scales = random.uniform(0.005, 0.02, (*pages[:2], 1, 2 * sizes.heads * SLOTS)).astype(np.float32)
    return Pages(padded(random.integers(-127, 128, (*pages, width), np.int8)), padded(scales))


def by_gather(query, positions, pages, sizes, table, first, window, scoring, *, is_latent=False):
    keys, values, distance = read_pages(
        pages, jnp.asarray(1), table, first, positions, sizes=sizes, slots=(), dtype=jnp.float32
    )
    keys, values = (jnp.concatenate([keys, values], axis=-1), keys) if is_latent else (keys, values)
    scores = jnp.einsum("bskgh,bkth->bskgt", query, keys) / scoring.divisor
    if scoring.softcap:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    asked = positions[:, :, None]
    visible = (distance >= 0) & (distance < (window or 10**6))
    if scoring.is_chunked:
        visible &= (asked - distance) // window == asked // window
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bskgt,bkth->bskgh", weights, values)


CASES = (
    (1, 4, 32, None, None, False, False),
    (5, 3, 16, 70, 20.0, False, False),
    (1, 1, 64, None, None, True, False),
    (5, 2, 16, 101, None, False, True),
    (30, 3, 16, 70, None, False, False),
    (1, 2, 24, None, None, False, False),
    (2, 1, 12, None, None, True, False),
)
"""Tokens, query heads of a kv head, dims of a head, window, softcap, whether pages are int8 and windows chunks."""

LANES = {attend_to_pages: 1, attend_to_pages_on_tpu: 128}
"""The kernels, and what rows of pages are padded to."""


@pytest.mark.parametrize("kernel", LANES)
@pytest.mark.parametrize(("length", "group", "head_dim", "window", "softcap", "is_int8", "is_chunked"), CASES)
def test_the_kernel_gives_what_a_gather_gives(kernel, length, group, head_dim, window, softcap, is_int8, is_chunked):
    """Tables begin at the third page of one row; another row has a single page of tokens."""
    random, scoring = np.random.default_rng(0), Scoring(head_dim**0.5, softcap, is_chunked)
    query = random.standard_normal((BATCH, length, HEADS, group, head_dim), np.float32)
    sizes = TokenSizes(HEADS, head_dim, head_dim)
    pages = drawn_pages(random, sizes, is_int8=is_int8, lanes=LANES[kernel])
    table = random.permutation(BATCH * ENTRIES).reshape(BATCH, ENTRIES).astype(np.int32)
    first = np.array([0, 2, 0], np.int32)
    positions = np.array([[200], [330], [3]], np.int32) + np.arange(length, dtype=np.int32)

    @jax.jit
    def both(query, positions, pages, table, first):
        found = kernel(
            query, positions, pages, jnp.asarray(1), table, first, sizes=sizes, offset=0, page_size=SLOTS,
            window=window, scoring=scoring, is_interpreted=True,
        )  # fmt: skip
        wanted = by_gather(query, positions, pages, sizes, table, first, window, scoring)
        return found.product / found.sums[..., None], wanted

    np.testing.assert_allclose(*both(query, positions, pages, table, first), atol=2e-6)


@pytest.mark.parametrize(
    ("kernel", "length", "heads", "is_int8"),
    [
        (attend_to_pages, 1, 40, False),
        (attend_to_pages, 3, 5, True),
        (attend_to_pages_on_tpu, 7, 40, False),
        (attend_to_pages_on_tpu, 3, 5, True),
    ],
)
def test_latents_are_read_as_keys_and_values(kernel, length, heads, is_int8):
    """40 heads, or 7 times 40, are two sets of queries, of which the last is padded."""
    random, scoring, rank, rotary = np.random.default_rng(0), Scoring(6.0), 32, 16
    sizes = TokenSizes(1, rank, rotary)
    pages = drawn_pages(random, sizes, is_int8=is_int8, lanes=LANES[kernel])
    query = random.standard_normal((BATCH, length, 1, heads, rank + rotary), np.float32)
    table = random.permutation(BATCH * ENTRIES).reshape(BATCH, ENTRIES).astype(np.int32)
    first = np.array([0, 2, 0], np.int32)
    positions = np.array([[200], [330], [3]], np.int32) + np.arange(length, dtype=np.int32)

    @jax.jit
    def both(query, positions, pages, table, first):
        found = kernel(
            query, positions, pages, jnp.asarray(1), table, first, sizes=sizes, offset=0, page_size=SLOTS,
            window=None, scoring=scoring, is_latent=True, is_interpreted=True,
        )  # fmt: skip
        wanted = by_gather(query, positions, pages, sizes, table, first, None, scoring, is_latent=True)
        return found.product / found.sums[..., None], wanted

    np.testing.assert_allclose(*both(query, positions, pages, table, first), atol=2e-6)


def test_the_kernel_is_left_out_where_triton_or_32_bits_do_not_do():
    def fits(dtype, count, slots=16):
        return fits_kernel(Pages(jax.ShapeDtypeStruct((1, count, 16, 2048), dtype)), slots)

    assert fits("bfloat16", 1 << 10)
    assert fits("int8", 1 << 15)
    assert not fits("bfloat16", 1 << 10, 12)
    assert not fits("bfloat16", 1 << 10, 128)
    assert not fits("int8", 1 << 16)
    assert fits_tpu_kernel(16, 1 << 17)
    assert not fits_tpu_kernel(16, 1 << 18)
    assert not fits_tpu_kernel(12, 1 << 10)
