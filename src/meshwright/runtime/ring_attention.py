"""Attention over a sequence that is split over a mesh axis: keys and values go round a ring of its devices.

RingAttention (arXiv:2310.01889). Each device keeps its queries and sees the keys and values of one device after the
other, which travel in their own dtype while those before them are worked on; backward their float32 gradients travel
with them and come home. The zigzag order gives every device of a causal sequence as much to do.
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
from meshwright.runtime import blockwise
from meshwright.runtime.blockwise import ATTENDED, Gradients, Keys, Seen, held
from meshwright.runtime.places import Mask, Places, is_seen
from meshwright.runtime.shards import alike

Tree = TypeVar("Tree")

Sums = tuple[Array, Array]
"""The float32 gradients of some keys and values so far."""

Carry = tuple[Array, Keys, Sums | None]
"""The gradient of queries so far, the keys that are here, and the gradients of those that were here before them."""


class Steps(Protocol):
    """What attention over keys that come one chunk after another is made of: the module `blockwise`, or `flash`."""

    def nothing_seen(self, query: Array, /) -> Seen:
        """The partial softmax of queries before any key."""
        ...

    def see(self, seen: Seen, query: Array, places: Places, keys: Keys, mask: Mask, /) -> Seen:
        """The partial softmax after more keys and values."""
        ...

    def finish(self, seen: Seen, dtype: jnp.dtype, /) -> tuple[Array, Array]:
        """The output of all keys seen, and the logarithm of each softmax's sum."""
        ...

    def inner_product(self, gradient: Array, output: Array, /) -> Array:
        """The inner product of each query's output and its gradient."""
        ...

    def back(
        self, gradient: Array, known: Gradients, places: Places, keys: Keys, mask: Mask, /
    ) -> tuple[Array, Array, Array]:
        """The queries' gradient with that through some keys added, and the gradients of these keys and values."""
        ...


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def ring_attention(
    query: Array, places: Places, keys: Keys, axis: str | None, mask: Mask, steps: Steps = blockwise
) -> Array:
    """Attention of this device's queries over the keys and values of a whole axis, arrays as `steps` lays them.

    To be called inside `jax.shard_map`, on shards of the sequence in any order: what a query sees follows from its
    place and those that travel with the keys. axis: None where all keys are here, a ring of one. Scores and softmax are
    float32. Forward a device sends its keys and values P - 1 times, backward again, and as often their gradients.
    Returns an array of the query's shape and dtype.
    """
    return _forward(query, places, keys, axis, mask, steps)[0]


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


def _forward(
    query: Array, places: Places, keys: Keys, axis: str | None, mask: Mask, steps: Steps
) -> tuple[Array, tuple]:
    """The output, and what backward needs."""
    query, places, keys = held(query, places, keys)

    def step(carry: tuple[Seen, Keys], _: None) -> tuple[tuple[Seen, Keys], None]:
        seen, coming = carry
        # Sent on before it is worked on, so that it travels meanwhile.
        following = _shift(coming, axis)
        return (steps.see(seen, query, places, coming, mask), following), None

    carry = steps.nothing_seen(query), _varying(keys)
    if (size := _size(axis)) > 1:
        carry, _ = jax.lax.scan(step, carry, length=size - 1)
    seen = steps.see(carry[0], query, places, carry[1], mask)
    output, log_total = checkpoint_name(steps.finish(seen, query.dtype), ATTENDED)
    return output, (query, places, keys, output, log_total)


def _backward(axis: str | None, mask: Mask, steps: Steps, saved: tuple, gradient: Array) -> tuple[Array, None, Keys]:
    """The gradients of queries, keys and values.

    Those of keys and values follow them round the ring, one step behind, so that they too travel while there is work;
    a device's part of the gradients of its own stays at home, and P - 1 sends bring it the rest.
    """
    query, places, keys, output, log_total = saved
    known = Gradients(query, gradient, log_total, steps.inner_product(gradient, output))

    def work(of_query: Array, coming: Keys, sums: Sums | None) -> tuple[Array, Sums]:
        arriving = _shift(sums, axis)
        of_query, of_key, of_value = steps.back(of_query, known, places, coming, mask)
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
    """The devices of a ring."""
    return 1 if axis is None else jax.lax.axis_size(axis)


def _shift(tree: Tree, axis: str | None) -> Tree:
    """Every array of a tree, sent to the next device of the ring."""
    size = _size(axis)
    if size == 1:
        return tree
    pairs = [(source, (source + 1) % size) for source in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)


def _varying(keys: Keys) -> Keys:
    """Keys whose places are typed as varying over every mesh axis that they vary over, as what comes round is."""
    axes = jax.typeof(keys.key).manual_axis_type.varying
    return keys._replace(places=jax.tree.map(lambda x: alike(x, axes=axes)[0], keys.places))
