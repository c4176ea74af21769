"""Linear attention as work on sharded arrays: its convolutions, and the gated delta rule in chunks of tokens.

The matmuls of the rule (`execution.runtime.attention.delta`) multiply two values, not a value and a weight. Their rows
are the tokens of each head, padded to whole chunks.

If sp splits sequences (`execution.runtime.attention.split_delta`), each device computes beside the outputs of its parts
by what factor they multiply the state before them: as many further columns as a key has elements. These factors and the
states are all-gathered. The convolutions of a part read the last tokens of the part before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.description.step.ir import Array, Dim
from meshwright.description.step.layer import DELTA_CHUNK, GatedDelta
from meshwright.description.step.passes.nodes import Exchange, Layout, Move, PassOver, Product, Work

TOKENS, AFTER_STATE, AFTER_CHUNK = "Z", "Y", "W"
"""Symbols for the tokens of a sequence, padded to whole chunks; for those of them that read or write a state; and for
those of them that read a state with a gradient, if one may be that of an earlier chunk."""

PARTS, AFTER_PARTS = "U", "X"
"""Symbols for the parts into which sp cuts a sequence, and for those whose factor multiplies the state before them."""

HALO = "tokens before"
"""Name of the collectives that send the last tokens of a part to the device that has the next part."""


def chunk_sizes(length: int, num_parts: int = 1, *, has_state: bool = False) -> dict[str, float]:
    """Return the sizes of the symbols for sequences of `length` tokens.

    Args:
        length: tokens of a sequence.
        num_parts: parts into which sp cuts a sequence.
        has_state: whether sequences start from a state; if False, a sequence of a single chunk has no state at all.
    """
    padded = -(-length // num_parts // DELTA_CHUNK) * DELTA_CHUNK
    after = padded * num_parts if padded > DELTA_CHUNK else 0
    return {
        TOKENS: padded * num_parts,
        AFTER_STATE: padded * num_parts if has_state or num_parts > 1 else after,
        AFTER_CHUNK: after,
        PARTS: num_parts,
        AFTER_PARTS: max(num_parts - 2, 0),
    }


def delta_work(op: GatedDelta, name: str, arrays: Mapping[str, Array], layout: Layout) -> list[Work]:
    """Return the work of linear attention, without its parameters.

    Args:
        op: linear attention.
        name: the name of all its matmuls in records.
        arrays: sharded arrays by name, which include the inputs of `op`.
        layout: the layout.
    """
    values = arrays[op.value]
    convolved = [arrays[value] for _, value, _ in op.convolved]
    passes = [PassOver(kind="convolution", arrays=(array,)) for array in convolved]
    if not layout.sequence:
        return [*passes, *delta_matmuls(op, name, values), PassOver(kind="delta", arrays=(values,))]
    batch, tokens, heads, group, _ = values.dims
    key, value = Dim("H", op.key_dim), Dim("V", op.value_dim)
    both = value._replace(size=op.key_dim + op.value_dim)
    channels = Dim("M", 2 * op.key_dim + op.group * op.value_dim)
    sent = Array(HALO, (batch, Dim("T", op.taps - 1), heads, channels))
    halo = Exchange(
        name=HALO, kind="collective-permute", axes=layout.sequence, array=sent,
        phases=("forward", "recompute", "backward"), times=2 if layout.is_zigzag else 1,
    )  # fmt: skip
    own = Array("states", (batch, Dim(PARTS, None, layout.sequence), heads, group, key, both), width="float32")
    gathered = replace(own, dims=(batch, Dim(PARTS, None), *own.dims[2:]))
    from_state = Product(
        name=name, rows=(batch, tokens, heads, group), inner=(key,), columns=(value,), source="queries", right="states"
    )
    of_parts = (batch, Dim(AFTER_PARTS, None), heads, group, key)
    return [
        *((halo,) if op.taps > 1 else ()),
        *passes,
        *delta_matmuls(op, name, values, both),
        PassOver(kind="delta", arrays=(values,)),
        PassOver(kind="delta_factors", arrays=(Array("factors", (*values.dims[:-1], key), width="float32"),)),
        Move(name="states", before=own, after=gathered, pending=layout.sequence),
        PassOver(kind="delta_parts", arrays=(gathered,)),
        replace(from_state, rows=of_parts, inner=(Dim("J", op.key_dim),), source="factors of parts"),
        from_state,
    ]


def delta_matmuls(op: GatedDelta, name: str, values: Array, state: Dim | None = None) -> list[Product]:
    """Return the matmuls of the gated delta rule, each for all chunks together.

    Args:
        op: the gated delta rule.
        name: the name of all the matmuls in records.
        values: its values [batch, sequence, heads, group, value_dim], with their sharding.
        state: columns of a state; default: those of the values.
    """
    batch, sequence, heads, group, _ = values.dims
    tokens = (batch, Dim(TOKENS, None, sequence.axes), heads)
    rows, stateful = (*tokens, group), (batch, Dim(AFTER_STATE, None, sequence.axes), heads, group)
    after_chunk = (batch, Dim(AFTER_CHUNK, None, sequence.axes), heads, group)
    key, value, chunk = Dim("H", op.key_dim), Dim("V", op.value_dim), Dim("C", DELTA_CHUNK)
    columns = state or value

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
        product(rows, chunk, columns, "scores", "corrections"),
        product(stateful, chunk, key, "inverses", "keys of the chunk"),
        replace(product(stateful, key, columns, "corrected keys", "states"), right_rows=after_chunk),
        replace(product(stateful, key, columns, "queries", "states"), right_rows=after_chunk),
        product(stateful, key, columns, "keys", "corrections"),
    ]
