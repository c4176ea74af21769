"""Attention over a sequence that is split over a mesh axis: keys and values go round a ring of its devices.

RingAttention (arXiv:2310.01889). Each device keeps its queries and sees the keys and values of one device after the
other, which travel in their own dtype while those before them are worked on; backward their float32 gradients travel
with them and come home. The zigzag order gives every device of a causal sequence as much to do.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import MeshwrightError
from meshwright.parallel.blockwise import (
    ATTENDED,
    Gradients,
    Keys,
    Mask,
    Places,
    Seen,
    back,
    finish,
    held,
    inner_product,
    is_seen,
    nothing_seen,
    see,
)

Tree = TypeVar("Tree")

BackwardCarry = tuple[Array, Keys, tuple[Array, Array]]
"""The gradient of queries so far, the keys that are here, and the gradients of these so far."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ring_attention(query: Array, places: Places, keys: Keys, axis: str, mask: Mask) -> Array:
    """Attention of this device's queries [b, s, k, g, h] over the keys and values [b, s, k, h] of a whole axis.

    To be called inside `jax.shard_map`, on shards of the sequence in any order: what a query sees follows from its
    place and those that travel with the keys. Scores and softmax are float32. Forward a device sends its keys and
    values P - 1 times. Returns an array of the query's shape and dtype.
    """
    return _forward(query, places, keys, axis, mask)[0]


def zigzag(length: int, degree: int) -> np.ndarray:
    """The order of positions in which `degree` devices have equal work of a causal sequence: [length] indices.

    The sequence is cut into 2 P parts, and device i has parts i and 2 P - 1 - i, an early one that sees little with a
    late one that sees much (as in Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2). Raises where 2 P
    does not divide the length.
    """
    parts = 2 * degree
    if length % parts:
        raise MeshwrightError(
            f"a sequence of {length} cannot be cut into {parts} parts, two for each of sp={degree}:"
            f" {length} % {parts} = {length % parts}; use a multiple of {parts}"
        )
    cut = np.arange(length).reshape(parts, -1)
    return np.concatenate([cut[[rank, parts - 1 - rank]].ravel() for rank in range(degree)])


def work(places: Places, degree: int, mask: Mask, *, block: int) -> list[int]:
    """The blocks that each device works on when a sequence [b, length] in some order is split over `degree` devices."""
    tiles = jax.tree.map(lambda x: np.asarray(x).reshape(x.shape[0], -1, block), places)
    count = tiles.positions.shape[1]

    def tile(index: int) -> Places:
        return jax.tree.map(lambda x: x[:, index], tiles)

    each = count // degree
    return [
        sum(
            bool(is_seen(tile(row), tile(column), mask))
            for row in range(first, first + each)
            for column in range(count)
        )
        for first in range(0, count, each)
    ]


def _forward(query: Array, places: Places, keys: Keys, axis: str, mask: Mask) -> tuple[Array, tuple]:
    """The output, and what backward needs."""
    query, places, keys = held(query, places, keys)

    def step(carry: tuple[Seen, Keys], _: None) -> tuple[tuple[Seen, Keys], None]:
        seen, coming = carry
        # Sent on before it is worked on, so that it travels meanwhile.
        following = _shift(coming, axis)
        return (see(seen, query, places, coming, mask), following), None

    start = (nothing_seen(query), _varying(keys))
    (seen, last), _ = jax.lax.scan(step, start, length=jax.lax.axis_size(axis) - 1)
    output, log_total = checkpoint_name(finish(see(seen, query, places, last, mask), query.dtype), ATTENDED)
    return output, (query, places, keys, output, log_total)


def _backward(axis: str, mask: Mask, saved: tuple, gradient: Array) -> tuple[Array, None, Keys]:
    """The gradients of queries, keys and values; those of keys and values are summed on their way round."""
    query, places, keys, output, log_total = saved
    known = Gradients(query, gradient, log_total, inner_product(gradient, output))

    def step(carry: BackwardCarry, _: None) -> tuple[BackwardCarry, None]:
        of_query, coming, sums = carry
        following = _shift(coming, axis)
        of_query, of_key, of_value = back(of_query, known, places, coming, mask)
        return (of_query, following, _shift((sums[0] + of_key, sums[1] + of_value), axis)), None

    zeros = [jnp.zeros_like(x, dtype=jnp.float32) for x in (query, keys.key, keys.value)]
    start = (zeros[0], _varying(keys), (zeros[1], zeros[2]))
    (of_query, last, sums), _ = jax.lax.scan(step, start, length=jax.lax.axis_size(axis) - 1)
    of_query, of_key, of_value = back(of_query, known, places, last, mask)
    of_key, of_value = _shift((sums[0] + of_key, sums[1] + of_value), axis)
    found = Keys(of_key.astype(keys.key.dtype), of_value.astype(keys.value.dtype), None)  # type: ignore[arg-type]
    return of_query.astype(query.dtype), None, found


ring_attention.defvjp(_forward, _backward)


def _shift(tree: Tree, axis: str) -> Tree:
    """Every array of a tree, sent to the next device of the ring."""
    size = jax.lax.axis_size(axis)
    if size == 1:
        return tree
    pairs = [(source, (source + 1) % size) for source in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)


def _varying(keys: Keys) -> Keys:
    """Keys whose places are typed as varying over every mesh axis that they vary over, as what comes round is."""
    axes = jax.typeof(keys.key).manual_axis_type.varying

    def varying(x: Array) -> Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return keys._replace(places=jax.tree.map(varying, keys.places))
