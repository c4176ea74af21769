"""The gated delta rule in chunks is the rule of its definition, token by token: outputs, states and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.execution.runtime.attention.delta import (
    DeltaInputs,
    causal_convolution,
    chunked_delta_rule,
    delta_rule_step,
    unit_lower_inverse,
)

ROWS, HEADS, GROUP, KEY, VALUE = 2, 2, 3, 8, 5


def drawn(length, seed=0):
    """Inputs of so many tokens; the decays of some heads are close to 1, of others close to 0."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.standard_normal(shape, np.float32)

    gates = (ROWS, length, HEADS, GROUP)
    scale = np.geomspace(1e-3, 30.0, HEADS * GROUP, dtype=np.float32).reshape(HEADS, GROUP)
    return DeltaInputs(
        query=normal(ROWS, length, HEADS, KEY),
        key=normal(ROWS, length, HEADS, KEY),
        value=normal(*gates, VALUE),
        decay=-scale * np.logaddexp(np.float32(0), normal(*gates)),
        rate=1 / (1 + np.exp(-normal(*gates))),
    )


def empty():
    return np.zeros((ROWS, HEADS, GROUP, KEY, VALUE), np.float32)


@jax.jit
def by_token(inputs, state, ids=None):
    """The rule one token after the other; a document's first token starts from an empty state."""
    same = jnp.ones(inputs.query.shape[:2]) if ids is None else jnp.diff(ids, axis=1, prepend=ids[:, :1]) == 0

    def token(state, own):
        own, kept = own
        out, state = delta_rule_step(*own, jnp.where(kept[:, None, None, None, None], state, 0))
        return state, out

    by_place = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, same.astype(bool)))
    state, outputs = jax.lax.scan(token, state, by_place)
    return jnp.moveaxis(outputs, 0, 1), state


chunked = jax.jit(lambda inputs, state=None, **more: chunked_delta_rule(*inputs, state, **more))


def assert_close(found, wanted, tolerance=2e-6):
    """To a share of the largest value."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_chunks_are_token_by_token(length):
    inputs = drawn(length)
    state = np.random.default_rng(1).standard_normal(empty().shape, np.float32)
    assert_close(chunked(inputs, state), by_token(inputs, state))
    found, after = chunked(inputs)
    assert_close(found, by_token(inputs, empty())[0])
    assert (after is None) == (length <= 64)


def test_a_sequence_in_parts_is_the_whole_and_padding_changes_no_state():
    inputs = drawn(100)
    whole = chunked(inputs, empty())
    first, state = chunked(DeltaInputs(*(x[:, :37] for x in inputs)), empty())
    rest = DeltaInputs(*(x[:, 37:] for x in inputs))
    padded = DeltaInputs(*(np.pad(x, ((0, 0), (0, 9), *((0, 0),) * (x.ndim - 2))) for x in rest))
    second, after = chunked(padded, state)
    assert_close((np.concatenate([first, second[:, :63]], axis=1), after), whole)


def test_documents_do_not_read_each_other():
    """One ends within a chunk, one at its end, and the last within another."""
    inputs = drawn(140)
    ids = np.array([[1] * 20 + [2] * 44 + [3] * 76, [1] * 100 + [2] * 30 + [0] * 10], np.int32)
    assert_close(chunked(inputs, ids=ids)[0], by_token(inputs, empty(), ids)[0])


@pytest.mark.parametrize("length", [20, 70])
def test_gradients_are_those_of_the_rule_token_by_token(length):
    inputs = drawn(length)
    weights = np.random.default_rng(2).standard_normal((ROWS, length, HEADS, GROUP, VALUE), np.float32)
    found = jax.jit(jax.grad(lambda own: jnp.sum(chunked_delta_rule(*own)[0] * weights)))(inputs)
    wanted = jax.jit(jax.grad(lambda own: jnp.sum(by_token(own, empty())[0] * weights)))(inputs)
    assert_close(found, wanted, 1e-5)


def test_equal_keys_do_not_spoil_the_inverse():
    """All keys equal and every rate 1: powers of the triangle have binomials up to 10^17, its inverse only 1 and -1."""
    wanted = np.eye(64, dtype=np.float32) - np.eye(64, k=-1, dtype=np.float32)
    np.testing.assert_allclose(unit_lower_inverse(jnp.ones((1, 64, 64), jnp.float32))[0], wanted, atol=1e-6)


def test_a_convolution_reads_the_tokens_before_and_no_other_document():
    draw = np.random.default_rng(0)
    x, weights, before = (draw.standard_normal(shape, np.float32) for shape in ((1, 6, 2), (3, 2), (1, 2, 2)))
    convolve = jax.jit(causal_convolution)
    longer = np.concatenate([before, x], axis=1)[0]
    wanted = np.stack([sum(longer[token + tap] * weights[tap] for tap in range(3)) for token in range(6)])
    np.testing.assert_allclose(convolve(x, weights, before, None)[0], wanted, rtol=1e-5, atol=1e-6)
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2]], np.int32)
    apart = convolve(x[:, 2:], weights, np.zeros((1, 2, 2), np.float32), None)
    np.testing.assert_allclose(convolve(x, weights, before, ids)[:, 2:], apart, rtol=1e-5, atol=1e-6)
