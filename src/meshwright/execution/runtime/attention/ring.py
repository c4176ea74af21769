"""Ring attention over a sequence sharded on a mesh axis: keys and values pass round the ring, queries stay.

See RingAttention (arXiv:2310.01889). Each device sends keys and values on, in their own dtype, while it attends to
them. In backward their float32 gradients are sent along and return to the device of the keys. Zigzag order balances the
work of causal attention.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.attention import blockwise
from meshwright.execution.runtime.attention.blockwise import (
    ATTENTION_RESIDUALS,
    BackwardInputs,
    Keys,
    SoftmaxState,
    segments_after_query,
)
from meshwright.execution.runtime.attention.segments import Mask, Segments
from meshwright.execution.runtime.shards import match_varying

Tree = TypeVar("Tree")

Sums = tuple[Array, Array]
"""Accumulated float32 gradients of a chunk's keys and values."""

Carry = tuple[Array, Keys, Sums | None]
"""Accumulated gradient of the queries, the current chunk of keys, and the gradients of the previous chunk of keys."""


class Steps(Protocol):
    """The functions of attention over chunks of keys: the module `blockwise` or `flash`."""

    def init(self, query: Array, value_dim: int, /) -> SoftmaxState:
        """Return the softmax state before any key, for values with head dim `value_dim`."""
        ...

    def update(self, state: SoftmaxState, query: Array, segments: Segments, keys: Keys, mask: Mask, /) -> SoftmaxState:
        """Return the softmax state updated with more keys and values."""
        ...

    def finalize(self, state: SoftmaxState, dtype: jnp.dtype, /) -> tuple[Array, Array]:
        """Return the output, and the log-normalizer of each query."""
        ...

    def inner_product(self, gradient: Array, output: Array, /) -> Array:
        """Return the inner product of each query's output and its gradient."""
        ...

    def backward(
        self, gradient: Array, inputs: BackwardInputs, segments: Segments, keys: Keys, mask: Mask, /
    ) -> tuple[Array, Array, Array]:
        """Return `gradient` (of the queries) plus these keys' contribution, and the gradients of keys and values."""
        ...


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def ring_attention(
    query: Array, segments: Segments, keys: Keys, axis: str | None, mask: Mask, steps: Steps = blockwise
) -> Array:
    """Return attention of this device's queries over the keys and values of all devices of a mesh axis.

    Call it inside `jax.shard_map`. Tokens may be in any order: the mask is computed from the segments, which are sent
    with the keys. Scores and softmax are float32. Each of the P devices sends keys and values P - 1 times in forward
    and P - 1 times in backward, and their gradients P - 1 times. The result has the query's shape and dtype, but the
    head dim of the values.

    Args:
      segments: the queries' segments.
      keys: this device's keys and values.
      axis: the mesh axis; None if this device has all keys.
      steps: `blockwise` or `flash`, which also sets the order of the arrays' dims.
    """
    return _forward(query, segments, keys, axis, mask, steps)[0]


def zigzag(length: int, degree: int) -> np.ndarray:
    """Return the token order that balances causal work over `degree` devices: [length] positions.

    With P = `degree`, the sequence is cut into 2 P parts; device i holds parts i and 2 P - 1 - i, an early one with few
    visible keys and a late one with many (Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2). Raises if
    2 P does not divide the length.
    """
    parts = 2 * degree
    if length % parts:
        raise MeshwrightError(
            f"a sequence of {length} cannot be cut into {parts} parts, two for each of sp={degree}:"
            f" {length} % {parts} = {length % parts}; use a multiple of {parts}"
        )
    cut = np.arange(length).reshape(parts, -1)
    return np.concatenate([cut[[rank, parts - 1 - rank]].ravel() for rank in range(degree)])


def _forward(
    query: Array, segments: Segments, keys: Keys, axis: str | None, mask: Mask, steps: Steps
) -> tuple[Array, tuple]:
    query, segments, keys = segments_after_query(query, segments, keys)

    def step(carry: tuple[SoftmaxState, Keys], _: None) -> tuple[tuple[SoftmaxState, Keys], None]:
        state, coming = carry
        # Keys are sent on before they are processed, so that transfer and compute overlap.
        following = _shift(coming, axis)
        return (steps.update(state, query, segments, coming, mask), following), None

    carry = steps.init(query, keys.value.shape[-1]), _varying(keys)
    if (size := _size(axis)) > 1:
        carry, _ = jax.lax.scan(step, carry, length=size - 1)
    state = steps.update(carry[0], query, segments, carry[1], mask)
    output, log_total = checkpoint_name(steps.finalize(state, query.dtype), ATTENTION_RESIDUALS)
    return output, (query, segments, keys, output, log_total)


def _backward(axis: str | None, mask: Mask, steps: Steps, saved: tuple, gradient: Array) -> tuple[Array, None, Keys]:
    """Return the gradients of queries, of segments (None), and of keys and values.

    Gradients of keys and values follow the keys round the ring one step behind, so that their transfer also overlaps
    with compute. A device's contribution to the gradients of its own keys stays local; the other contributions arrive
    in P - 1 sends.
    """
    query, segments, keys, output, log_total = saved
    inputs = BackwardInputs(query, gradient, log_total, steps.inner_product(gradient, output))

    def work(of_query: Array, coming: Keys, sums: Sums | None) -> tuple[Array, Sums]:
        arriving = _shift(sums, axis)
        of_query, of_key, of_value = steps.backward(of_query, inputs, segments, coming, mask)
        added = of_key, of_value
        return of_query, added if arriving is None else jax.tree.map(jnp.add, arriving, added)

    def step(carry: Carry, _: None = None) -> tuple[Carry, None]:
        of_query, coming, sums = carry
        following = _shift(coming, axis)
        of_query, sums = work(of_query, coming, sums)
        return (of_query, following, sums), None

    start, size = jnp.zeros_like(query, dtype=jnp.float32), _size(axis)
    if size == 1:
        of_query, own = work(start, keys, None)
    else:
        (of_query, coming, own), _ = step((start, _varying(keys), None))
        carry: Carry = of_query, coming, None
        if size > 2:
            carry, _ = step(carry)
        if size > 3:
            carry, _ = jax.lax.scan(step, carry, length=size - 3)
        of_query, sums = work(*carry)
        own = jax.tree.map(jnp.add, own, _shift(sums, axis))
    found = Keys(own[0].astype(keys.key.dtype), own[1].astype(keys.value.dtype), None)  # type: ignore[arg-type]
    return of_query.astype(query.dtype), None, found


ring_attention.defvjp(_forward, _backward)


def _size(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def _shift(tree: Tree, axis: str | None) -> Tree:
    """Send every array of a tree to the next device of the ring."""
    size = _size(axis)
    if size == 1:
        return tree
    pairs = [(source, (source + 1) % size) for source in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)


def _varying(keys: Keys) -> Keys:
    """Return keys whose segments are typed as varying over the same mesh axes as the keys, like those received."""
    axes = jax.typeof(keys.key).manual_axis_type.varying
    return keys._replace(segments=jax.tree.map(lambda x: match_varying(x, axes=axes)[0], keys.segments))
