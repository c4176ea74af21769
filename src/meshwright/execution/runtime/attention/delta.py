"""The gated delta rule on one device (arXiv:2412.06464): for whole sequences in chunks, or for one token after a state.

Dims: b batch, s sequence, n chunks, c tokens of a chunk, e also tokens of a chunk, k heads of queries and keys, g value
heads that share one, d dims of a key, v dims of a value. Everything is computed in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.description.step.layer import DELTA_CHUNK
from meshwright.execution.runtime.shards import match_varying

EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by their length."""


class DeltaInputs(NamedTuple):
    """Queries and keys [b, s, k, d], values [b, s, k, g, v], and gates [b, s, k, g].

    decay: logarithm of the factor by which the state decays at each token, at most 0. rate: factor of each token's
    correction of the state, from 0 to 1.
    """

    query: Array
    key: Array
    value: Array
    decay: Array
    rate: Array


def _normalised(query: Array, key: Array) -> tuple[Array, Array]:
    """Return queries and keys [..., d] of unit length, queries also scaled by 1 / sqrt(d)."""
    query, key = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (query, key))
    return query / math.sqrt(query.shape[-1]), key


def causal_convolution(x: Array, weights: Array, before: Array, ids: Array | None) -> Array:
    """Return the causal convolution of each channel of x [b, s, ...]: a weighted sum of `taps` tokens up to each token.

    Args:
        x: the values, in float32.
        weights: [taps, ...]; the last tap multiplies the token's own value.
        before: values of the taps - 1 tokens before x [b, taps - 1, ...].
        ids: document of each of these and of x's tokens [b, taps - 1 + s]: values of other documents count as zeros;
            None if a row is one document.
    """
    taps, length = weights.shape[0], x.shape[1]
    longer = jnp.concatenate([before, x], axis=1)
    shifted = jnp.stack([longer[:, tap : tap + length] for tap in range(taps)])
    if ids is not None:
        same = jnp.stack([ids[:, tap : tap + length] == ids[:, taps - 1 :] for tap in range(taps)])
        shifted = jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), shifted, 0)
    return jnp.sum(shifted * weights[:, None, None], axis=0)


def chunked_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    rate: Array,
    state: Array | None = None,
    ids: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return the outputs of all tokens [b, s, k, g, v], and the state after them [b, k, g, d, v].

    The state is None if `state` is None and all tokens are in one chunk, because it is not computed then.

    Within a chunk, the corrections of all tokens are the solution of one triangular system (the UT transform, section
    3.3); a scan runs over the chunks. `step.passes.shard` plans these matmuls.

    Args:
        query, key, value, decay, rate: see `DeltaInputs`.
        state: the state before the first token [b, k, g, d, v]; None if it is empty. It may have more columns than the
            values; the result is then as if the values had zeros there.
        ids: document of each token [b, s]; None if a row is one document. Each document starts from an empty state,
            except that a row's first document starts from `state`.
    """
    length = query.shape[1]
    query, key, value, decay, rate = (_in_chunks(x) for x in (query, key, value, decay, rate))
    size = query.shape[2]
    # Normalised after padding: otherwise a compiled matmul would be counted with the size before padding.
    query, key = (jnp.moveaxis(x, 2, 3) for x in _normalised(query, key))  # [b, n, k, c, d]
    value, decay, rate = (jnp.moveaxis(x, 2, 4) for x in (value, decay, rate))  # [b, n, k, g, c, ...]
    total = jnp.cumsum(decay, axis=-1)
    visible, reads, writes, keeps = _documents(ids, size, total.shape[1])
    # Decays between two tokens are summed for each pair; differences of cumulative sums would cancel digits.
    after = jnp.tril(jnp.ones((size, size), bool), -1)
    between = jnp.cumsum(jnp.where(after, decay[..., None], 0), axis=-2)
    weight = jnp.exp(jnp.where(visible, between, -jnp.inf))
    of_keys = jnp.einsum("bnkcd,bnked->bnkce", key, key)[:, :, :, None]
    of_queries = jnp.einsum("bnkcd,bnked->bnkce", query, key)[:, :, :, None] * weight
    inverse = unit_lower_inverse(of_keys * weight * rate[..., None])
    new_values = jnp.einsum("bnkgce,bnkgev->bnkgcv", inverse, value * rate[..., None])
    if state is None and total.shape[1] == 1:
        return _in_rows(jnp.einsum("bnkgce,bnkgev->bnkgcv", of_queries, new_values), length), None
    if state is None:
        state = jnp.zeros((*value.shape[:1], *value.shape[2:4], query.shape[-1], value.shape[-1]))
    (state,) = match_varying(state, axes=jax.typeof(value).manual_axis_type.varying)
    new_values = jnp.pad(new_values, ((0, 0),) * 5 + ((0, state.shape[-1] - value.shape[-1]),))
    from_state = jnp.exp(total) * reads
    to_end = jnp.exp(between[..., -1, :]) * writes
    read_keys = jnp.einsum("bnkgce,bnkged->bnkgcd", inverse, key[:, :, :, None] * (rate * from_state)[..., None])
    of_chunks = (
        new_values,
        read_keys,
        query[:, :, :, None] * from_state[..., None],
        key[:, :, :, None] * to_end[..., None],
        of_queries,
        jnp.exp(total[..., -1]) * keeps,
    )

    def chunk(state: Array, own: tuple[Array, ...]) -> tuple[Array, Array]:
        new_values, read_keys, queries, keys, of_queries, kept = own
        new = new_values - jnp.einsum("bkgcd,bkgdv->bkgcv", read_keys, state)
        out = jnp.einsum("bkgcd,bkgdv->bkgcv", queries, state) + jnp.einsum("bkgce,bkgev->bkgcv", of_queries, new)
        return state * kept[..., None, None] + jnp.einsum("bkgcd,bkgcv->bkgdv", keys, new), out

    state, out = lax.scan(chunk, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), of_chunks))
    return _in_rows(jnp.moveaxis(out, 0, 1), length), state


def delta_rule_step(
    query: Array, key: Array, value: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """Return the output of one token of each row [b, k, g, v], and the state after it [b, k, g, d, v].

    Arguments are as in `DeltaInputs` without dim s, and the state before the token. Products with the state are
    elementwise instead of matmuls, because each reads the whole state for a single vector.
    """
    state = state * jnp.exp(decay)[..., None, None]
    query, key = (x[:, :, None, :, None] for x in _normalised(query, key))
    error = (value - jnp.sum(state * key, axis=-2)) * rate[..., None]
    state = state + key * error[..., None, :]
    return jnp.sum(state * query, axis=-2), state


@jax.custom_vjp
def unit_lower_inverse(lower: Array) -> Array:
    """Return the inverse of I + L, where L is the strictly lower triangle of `lower` [..., c, c]; c is a power of two.

    Blocks on the diagonal are inverted in pairs, from single elements up: with inverses A' and D' of A and D,
    [[A, 0], [B, D]] has the inverse [[A', 0], [-D' B A', D']]. If the matrix T holds all inverted blocks, and B all
    blocks below them, the next T is T - T B T: products of whole matrices, which TPUs store without padding. This is as
    stable as substitution; the elements of powers of L may grow like binomial coefficients of c and cancel. If dT is
    the gradient of the inverse T, the gradient of L is -T^T dT T^T.
    """
    size = lower.shape[-1]
    row, column = np.indices((size, size)).reshape(2, *(1,) * (lower.ndim - 2), size, size)

    def below(width: int) -> Array:
        """Return `lower` with zeros outside the block B of each pair of diagonal blocks of this width."""
        is_below = (row // width % 2 == 1) & (row // width - 1 == column // width)
        return jnp.where(is_below, lower, 0)

    # The inverses of 1 x 1 blocks are 1, so the first step needs no products.
    inverse = (row == column).astype(lower.dtype) - below(1)
    width = 2
    while width < size:
        inverse = inverse - _product(inverse, _product(below(width), inverse))
        width *= 2
    return inverse


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product(_product(transposed, gradient), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _product(left: Array, right: Array) -> Array:
    """Multiply matrices of the triangular system. Errors add up, so TPUs use three bf16 passes (`Precision.HIGH`)."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGH)


def _in_rows(x: Array, length: int) -> Array:
    """Return chunks [b, n, k, g, c, v] as sequences [b, s, k, g, v], cut to `length` tokens."""
    x = jnp.moveaxis(x, 4, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _in_chunks(x: Array) -> Array:
    """Return x [b, s, ...] padded with zeros, in chunks [b, n, c, ...]; tokens with rate and decay 0 keep the state."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % DELTA_CHUNK), *((0, 0),) * (x.ndim - 2)))
    return padded.reshape(x.shape[0], -1, DELTA_CHUNK, *x.shape[2:])


def _documents(ids: Array | None, size: int, count: int) -> tuple[Array, Array, Array, Array]:
    """Return which tokens and states share a document, as four factors that broadcast to [b, n, k, g, ...].

    There are n = `count` chunks of c = `size` tokens. The factors are: whether a query reads a key of its chunk
    (boolean, causal) [..., c, c]; 1 if a token shares a document with the state before its chunk, else 0 [..., c]; the
    same for the state after its chunk [..., c]; and 1 if both states share a document, else 0 [...].
    """
    causal = jnp.tril(jnp.ones((size, size), bool))[None, None, None, None]
    if ids is None:
        one = jnp.ones((1, count, 1, 1), jnp.float32)
        return causal, one[..., None], one[..., None], one
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(ids.shape[0], count, size)
    last = padded[:, :, -1]
    before = jnp.concatenate([padded[:, :1, 0], last[:, :-1]], axis=1)
    visible = causal & (padded[:, :, :, None] == padded[:, :, None])[:, :, None, None]
    reads, writes = ((padded == end[..., None]).astype(jnp.float32)[:, :, None, None] for end in (before, last))
    return visible, reads, writes, (before == last).astype(jnp.float32)[:, :, None, None]
