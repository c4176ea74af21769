"""Shard pass for experts: the collectives that bring tokens to their experts' devices, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.description.step.ir import Array, Dim
from meshwright.description.step.layer import Dispatch
from meshwright.description.step.parameter_tree import EXPERT_SCALE
from meshwright.description.step.passes.nodes import (
    Exchange,
    Layout,
    Phases,
)


def _to_experts(name: str, ep: tuple[str, ...], tp: tuple[str, ...], sent: Array, phases: Phases) -> Iterator[Exchange]:
    """Yield the collectives that bring rows to experts: an all-to-all over ep, then an all-gather over tp.

    Args:
        name: the name of the collectives.
        ep, tp: the mesh axes larger than 1 that split experts and their widths.
        sent: the array that a device sends.
        phases: the phases in which they run.
    """
    yield Exchange(name=name, kind="all-to-all", axes=ep, array=sent, phases=phases)
    if tp:
        whole = replace(sent, dims=(Dim("CT", None), *sent.dims[1:]))
        yield Exchange(name=name, kind="all-gather", axes=tp, array=whole, phases=phases)


def _from_experts(
    name: str, ep: tuple[str, ...], tp: tuple[str, ...], sent: Array, phases: Phases
) -> Iterator[Exchange]:
    """Yield the collectives that bring rows back from experts: a reduce-scatter over tp, then an all-to-all over ep."""
    if tp:
        whole = replace(sent, dims=(Dim("CT", None), *sent.dims[1:]))
        yield Exchange(name=name, kind="reduce-scatter", axes=tp, array=whole, phases=phases)
    yield Exchange(name=name, kind="all-to-all", axes=ep, array=sent, phases=phases)


def dispatch_moves(ep: tuple[str, ...], tp: tuple[str, ...], embed: int, op: Dispatch) -> Iterator[Exchange]:
    """Yield the collectives that send token copies, their weights and counts to experts (GShard, arXiv:2006.16668).

    ep, tp: as in `_to_experts`. embed: the width of a token copy.
    """
    forward: Phases = ("forward", "recompute")
    backward: Phases = ("backward",)
    rows = Array("rows", (Dim("C", None), Dim("D", embed)))
    shares = Array("shares", (Dim("C", None),), width="float32")
    yield from _to_experts("experts dispatch", ep, tp, rows, forward)
    yield from _from_experts("experts dispatch", ep, tp, rows, backward)
    yield from _to_experts("routing shares", ep, tp, shares, forward)
    yield from _from_experts("routing shares", ep, tp, shares, backward)
    if op.capacity_factor is None:
        counts = Array("counts", (Dim("sent", None),), width="float32")
        yield Exchange(name="routing counts", kind="all-to-all", axes=ep, array=counts, phases=forward)
        if tp:
            gathered = Array("counts", (Dim("gathered", None),), width="float32")
            yield Exchange(name="routing counts", kind="all-gather", axes=tp, array=gathered, phases=forward)


def combine_moves(
    ep: tuple[str, ...], tp: tuple[str, ...], embed: int, *, is_normed: bool = False
) -> Iterator[Exchange]:
    """Yield the collectives that send token copies back from experts, already multiplied by their routing weights.

    ep, tp, embed: as in `dispatch_moves`. is_normed: whether a norm reads the result, which backward then needs.
    """
    rows = Array("rows", (Dim("C", None), Dim("D", embed)))
    forward: Phases = ("forward", "recompute") if is_normed else ("forward",)
    yield from _from_experts("experts combine", ep, tp, rows, forward)
    yield from _to_experts("experts combine", ep, tp, rows, ("backward",))


def scale_sum(op: Dispatch, stack: str, layout: Layout) -> Iterator[Exchange]:
    """Yield the sum of the gradient of the experts' scale, if there is one and it trains.

    The experts run in one `shard_map`, which sums it over all axes that split the tokens at once.
    """
    if op.routing.has_expert_scale and f"{stack}.{EXPERT_SCALE}" not in layout.frozen:
        scale = Array(EXPERT_SCALE, (Dim("router", op.num_experts),), width="float32")
        axes = (*layout.batch, *layout.residual)
        yield Exchange(name="expert scale", kind="all-reduce", axes=axes, array=scale, phases=("backward",))


def routing_of_tokens(tp: tuple[str, ...], layout: Layout) -> Iterator[Exchange]:
    """Yield the collectives of routing over tp if there is no ep.

    The chosen experts and routing weights of tokens are gathered, and the gradients of the weights are summed; without
    the gather if tp does not split the stream.
    """
    if not tp:
        return
    array = Array("routing", (Dim("A", None),), width="float32")
    if layout.tp_stream == "whole":
        yield Exchange(name="routing shares", kind="all-reduce", axes=tp, array=array, phases=("backward",))
        return
    name = "routing experts and shares"
    yield Exchange(name=name, kind="all-gather", axes=tp, array=array, phases=("forward", "recompute"), times=2)
    yield Exchange(name="routing shares", kind="reduce-scatter", axes=tp, array=array, phases=("backward",))
