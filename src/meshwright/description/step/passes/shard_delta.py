"""The matmuls of the gated delta rule, computed in chunks of tokens (`execution.runtime.attention.delta`).

They multiply two values, not a value and a weight. Their rows are the tokens of each head, padded to whole chunks.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.step.ir import Array, Dim
from meshwright.description.step.layer import DELTA_CHUNK, GatedDelta
from meshwright.description.step.passes.nodes import Product

TOKENS, AFTER_STATE = "Z", "Y"
"""Symbols for the tokens of a sequence, padded to whole chunks, and for those of them that read or write a state."""


def chunk_sizes(length: int, *, has_state: bool) -> dict[str, float]:
    """Return the sizes of the symbols `TOKENS` and `AFTER_STATE` for sequences of `length` tokens.

    has_state: whether sequences start from a state; if False, a sequence of a single chunk has no state at all.
    """
    padded = -(-length // DELTA_CHUNK) * DELTA_CHUNK
    return {TOKENS: padded, AFTER_STATE: padded if has_state or padded > DELTA_CHUNK else 0}


def delta_matmuls(op: GatedDelta, name: str, values: Array) -> list[Product]:
    """Return the matmuls of the gated delta rule, each for all chunks together.

    Args:
        op: the gated delta rule.
        name: the name of all the matmuls in records.
        values: its values [batch, sequence, heads, group, value_dim], with their sharding.
    """
    batch, _, heads, group, _ = values.dims
    tokens = (batch, Dim(TOKENS, None), heads)
    rows, stateful = (*tokens, group), (batch, Dim(AFTER_STATE, None), heads, group)
    key, value, chunk = Dim("H", op.key_dim), Dim("V", op.value_dim), Dim("C", DELTA_CHUNK)

    def product(rows: tuple[Dim, ...], inner: Dim, columns: Dim, left: str, right: str) -> Product:
        return Product(name=name, rows=rows, inner=(inner,), columns=(columns,), source=left, right=right)

    found = [
        product(tokens, key, chunk, "keys", "keys of the chunk"),
        product(tokens, key, chunk, "queries", "keys of the chunk"),
    ]
    inverse = product(rows, chunk, Dim("J", DELTA_CHUNK), "systems", "inverses")
    # The inverse of a chunk is computed from blocks of size 2, with two matmuls for each doubling of the size.
    found += [replace(inverse, passes="forward")] * (2 * (DELTA_CHUNK.bit_length() - 2))
    return [
        *found,
        replace(inverse, passes="backward"),
        product(rows, chunk, value, "inverses", "values of the chunk"),
        product(rows, chunk, value, "scores", "corrections"),
        product(stateful, chunk, key, "inverses", "keys of the chunk"),
        product(stateful, key, value, "corrected keys", "states"),
        product(stateful, key, value, "queries", "states"),
        product(stateful, key, value, "keys", "corrections"),
    ]
