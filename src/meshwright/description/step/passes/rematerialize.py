"""Rematerialize pass: which ops of a layer are recomputed for backward, given the values that a policy saves.

An unsaved value is recomputed if backward or another recomputed op reads it. So the last matmul of a layer and its
collective are never recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from meshwright.description.step.layer import SHARED_KEY, SHARED_VALUE, STREAM
from meshwright.description.step.layer_inputs import LAYER_INPUT, STREAMS
from meshwright.description.step.passes.nodes import Core, Node, Product, Tag
from meshwright.description.step.workload import Remat

KEPT: Mapping[Remat, frozenset[Tag]] = {
    "none": frozenset({Tag.PRODUCT, Tag.READ}),
    "attention": frozenset({Tag.PRODUCT, Tag.READ}),
    "matmuls": frozenset({Tag.PRODUCT}),
    "block": frozenset(),
    "offload": frozenset(),
    "alternate": frozenset({Tag.PRODUCT}),
    "named": frozenset(),
}
"""By remat policy, the tags of the nodes whose results it saves, besides the layer's input."""


NAMED: Mapping[str, tuple[str, ...]] = {
    "query": ("query",),
    "key": ("key",),
    "value": ("value",),
    "context": ("attention_heads",),
    "output": ("attention_added",),
    "mlp": ("gate", "up"),
    "down": ("mlp_added",),
}
"""By a name in `FrameworkProfile.saved_values`: the names of the values (results of nodes) that it stands for."""


def keeps_read(remat: Remat) -> bool:
    """Whether a policy saves the inputs of matmuls, so that no collective is recomputed for them."""
    return Tag.READ in KEPT[remat]


@lru_cache(maxsize=1 << 12)
def recomputed(
    nodes: tuple[Node, ...], remat: Remat, *, is_whole: bool = False, saved: tuple[str, ...] = ()
) -> frozenset[int]:
    """Return the indices of the nodes of a layer that are recomputed for backward.

    Args:
        nodes: the nodes of the layer, in order.
        remat: the policy.
        is_whole: whether to recompute all nodes with `block` and `offload`, like frameworks that recompute a block to
            its end.
        saved: with `named`, the names (keys of `NAMED`) of the values that are saved.
    """
    if is_whole and remat in ("block", "offload"):
        return frozenset(range(len(nodes)))
    kept = frozenset(name for value in saved for name in NAMED[value]) if remat == "named" else frozenset[str]()
    found = _needed(nodes, KEPT[remat], kept)
    if remat == "alternate":
        # Attention is saved, and every second matmul is recomputed (torchtitan's selective checkpointing of ops).
        products = [i for i, node in enumerate(nodes) if any(isinstance(work, Product) for work in node.work)]
        attention = {i for i, node in enumerate(nodes) if any(isinstance(work, Core) for work in node.work)}
        found = (found - attention) | set(products[1::2])
    return frozenset(found)


def _needed(nodes: Sequence[Node], kept: frozenset[Tag], named: frozenset[str]) -> set[int]:
    """Return the indices of the nodes to recompute: those whose unsaved result backward or a recomputed node reads.

    Args:
        nodes: the nodes of a layer, in order.
        kept: the tags of results that are saved.
        named: names of results of matmuls and of attention that are saved too.
    """
    # The node that wrote each value that a node reads or saves; None for a value from outside the layer. A name may be
    # written several times (rotation in place): a node reads the latest value before it.
    last: dict[str, int] = {}
    writers: dict[tuple[int, str], int | None] = {}
    for i, node in enumerate(nodes):
        for name in node.reads:
            writers[i, name] = last.get(name)
        if node.writes:
            last[node.writes] = i
        for name in node.saved:
            writers.setdefault((i, name), last.get(name))
    outside = (STREAM, STREAMS, LAYER_INPUT, SHARED_KEY, SHARED_VALUE)
    assert all(name in outside or writer is not None for (_, name), writer in writers.items()), writers
    waiting = [writers[i, name] for i, node in enumerate(nodes) for name in node.saved]
    # Attention's backward reads its own output, so the writer of a saved value may be the node itself.
    found: set[int] = set()
    while waiting:
        writer = waiting.pop()
        if writer is None or writer in found or nodes[writer].tag in kept:
            continue
        if nodes[writer].writes in named and any(isinstance(work, Product | Core) for work in nodes[writer].work):
            continue
        found.add(writer)
        waiting.extend(writers[writer, name] for name in nodes[writer].reads)
    return found
