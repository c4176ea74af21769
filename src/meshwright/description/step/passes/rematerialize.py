"""Rematerialize pass: which ops of a layer are recomputed for backward, given the values that a policy saves.

An unsaved value is recomputed if backward, or another recomputed op, reads it. So the last matmul of a layer is never
recomputed, nor is its collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from meshwright.description.step.layer import STREAM
from meshwright.description.step.passes.nodes import Core, Node, Product, Tag
from meshwright.description.step.workload import Remat

KEPT: Mapping[Remat, frozenset[Tag]] = {
    "none": frozenset({Tag.PRODUCT, Tag.READ}),
    "attention": frozenset({Tag.PRODUCT, Tag.READ}),
    "matmuls": frozenset({Tag.PRODUCT}),
    "block": frozenset(),
    "offload": frozenset(),
    "alternate": frozenset({Tag.PRODUCT}),
}
"""Values of a layer that each policy saves besides its input."""


def keeps_read(remat: Remat) -> bool:
    """Whether a policy saves the inputs of matmuls, so that no collective is recomputed for them."""
    return Tag.READ in KEPT[remat]


@lru_cache(maxsize=1 << 12)
def recomputed(nodes: tuple[Node, ...], remat: Remat, *, is_whole: bool = False) -> frozenset[int]:
    """Return the positions of the nodes of a layer that are recomputed for backward.

    Args:
        is_whole: with `block` and `offload`, recompute every op (`FrameworkProfile.recomputes_whole_blocks`).
    """
    if is_whole and remat in ("block", "offload"):
        return frozenset(range(len(nodes)))
    found = _needed(nodes, KEPT[remat])
    if remat == "alternate":
        # Attention is saved, every second matmul is recomputed (torchtitan's selective checkpointing of ops).
        products = [i for i, node in enumerate(nodes) if any(isinstance(work, Product) for work in node.work)]
        attention = {i for i, node in enumerate(nodes) if any(isinstance(work, Core) for work in node.work)}
        found = (found - attention) | set(products[1::2])
    return frozenset(found)


def _needed(nodes: Sequence[Node], kept: frozenset[Tag]) -> set[int]:
    """Return the positions of nodes that backward needs, directly or not, and whose tag is not in `kept`."""
    writers = _writers(nodes)
    waiting = [writers[i, name] for i, node in enumerate(nodes) for name in node.saved]
    # Attention's backward reads its own output, so the writer of a saved value may be the node itself.
    found: set[int] = set()
    while waiting:
        writer = waiting.pop()
        if writer is None or writer in found or nodes[writer].tag in kept:
            continue
        found.add(writer)
        waiting.extend(writers[writer, name] for name in nodes[writer].reads)
    return found


def _writers(nodes: Sequence[Node]) -> dict[tuple[int, str], int | None]:
    """Map (position of a node, value it reads or saves) to the position of the writer; None for the layer's input.

    A name may be written several times (rotation in place): a node reads the latest value before it.
    """
    last: dict[str, int] = {}
    found: dict[tuple[int, str], int | None] = {}
    for i, node in enumerate(nodes):
        for name in node.reads:
            found[i, name] = last.get(name)
        if node.writes:
            last[node.writes] = i
        for name in node.saved:
            found.setdefault((i, name), last.get(name))
    assert all(name == STREAM or writer is not None for (_, name), writer in found.items()), found
    return found
