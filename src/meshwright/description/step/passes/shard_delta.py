"""The matmuls of the gated delta rule in chunks (`execution.runtime.attention.delta`), as products of two values.

Their rows are the tokens, padded to whole chunks (the symbol `Z`), of each head.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.step.ir import Array, Dim
from meshwright.description.step.layer import DELTA_CHUNK, LEAST_DELTA_MATMUL, GatedDelta
from meshwright.description.step.passes.nodes import Product

PADDED_TOKENS = "Z"
"""Symbol of a sequence's tokens, padded to whole chunks of the gated delta rule."""


def padded_tokens(length: int) -> int:
    """Return the tokens of a sequence, padded to whole chunks."""
    return -(-length // DELTA_CHUNK) * DELTA_CHUNK


def delta_matmuls(op: GatedDelta, name: str, values: Array) -> list[Product]:
    """Return the matmuls of all chunks.

    Args:
        op: the gated delta rule.
        name: their name in records.
        values: its values [batch, sequence, heads, group, value_dim], with their sharding.
    """
    batch, _, heads, group, _ = values.dims
    tokens = (batch, Dim(PADDED_TOKENS, None), heads)
    rows = (*tokens, group)
    key, value, chunk = Dim("H", op.key_dim), Dim("V", op.value_dim), Dim("C", DELTA_CHUNK)

    def product(rows: tuple[Dim, ...], inner: Dim, columns: Dim, left: str, right: str) -> Product:
        return Product(name=name, rows=rows, inner=(inner,), columns=(columns,), source=left, right=right)

    found = [
        product(tokens, key, chunk, "keys", "keys of the chunk"),
        product(tokens, key, chunk, "queries", "keys of the chunk"),
    ]
    width = LEAST_DELTA_MATMUL
    while width < DELTA_CHUNK:
        # Two products of each pair of blocks, each with half of the rows.
        blocks = product(rows, Dim("I", width), Dim("J", width), "blocks", "inverses of blocks")
        found.append(replace(blocks, passes="forward"))
        width *= 2
    inverse = product(rows, chunk, Dim("J", DELTA_CHUNK), "systems", "inverses")
    return [
        *found,
        replace(inverse, passes="backward"),
        product(rows, chunk, value, "inverses", "values of the chunk"),
        product(rows, chunk, key, "inverses", "keys of the chunk"),
        product(rows, key, value, "corrected keys", "states"),
        product(rows, key, value, "queries", "states"),
        product(rows, chunk, value, "scores", "corrections"),
        product(rows, key, value, "keys", "corrections"),
    ]
