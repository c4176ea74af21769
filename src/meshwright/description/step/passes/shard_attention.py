"""The collectives of attention over sequences that sp splits, besides the gather of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.description.step.ir import Array, Operand
from meshwright.description.step.layer import Attention
from meshwright.description.step.passes.nodes import Exchange, Layout, Phases, Work
from meshwright.record import Kind


def whole_sequences(op: Attention, arrays: tuple[Array, Array, Array, Array], layout: Layout) -> Iterator[Work]:
    """Yield the all-to-alls of Ulysses, for queries, keys, values and the output, which are `arrays`."""
    query, key, value, output = arrays
    exchanged: tuple[tuple[str, Array, Operand | None], ...] = (
        ("queries", query, "query"),
        ("keys", key, "key"),
        ("values", value, "value"),
        ("attention output", output, None),
    )
    for label, array, operand in exchanged:
        is_shared = op.is_sharing and array in (key, value)  # Forward has them of the earlier layer.
        phases: Phases = ("recompute",) if is_shared else ("forward", "recompute")
        yield _exchange(label, "all-to-all", array, phases, layout)
        gradient = _exchange(f"{label} gradient", "all-to-all", array, ("backward",), layout)
        yield replace(gradient, gradient_of=operand)


def ring(key: Array, value: Array, layout: Layout) -> Iterator[Work]:
    """Yield the sends of ring attention over sp: keys, values and positions in all phases, gradients in backward.

    Gradients are sent in float32. On a ring of two devices the compiler removes the sends in backward that repeat those
    of the recomputation.
    """
    positions = Array("positions", layout.tokens, width="float32")
    phases: Phases = ("forward", "recompute", "backward")
    operands: tuple[tuple[str, Array, Operand], ...] = (("keys", key, "key"), ("values", value, "value"))
    for label, array, operand in operands:
        yield _exchange(label, "collective-permute", array, phases, layout)
        wide = replace(array, width="float32")
        gradient = _exchange(f"{label} gradient", "collective-permute", wide, ("backward",), layout)
        yield replace(gradient, gradient_of=operand)
    yield _exchange("positions", "collective-permute", positions, phases, layout)
    if layout.is_packed:
        segments = replace(positions, name="segments")
        yield _exchange("segments", "collective-permute", segments, phases, layout)


def _exchange(name: str, kind: Kind, array: Array, phases: Phases, layout: Layout) -> Exchange:
    """Return a collective over the axes that split the sequence; a collective-permute goes round a ring."""
    is_ring = kind == "collective-permute"
    return Exchange(name=name, kind=kind, axes=layout.sequence, array=array, phases=phases, is_ring=is_ring)
