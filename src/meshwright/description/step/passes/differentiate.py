"""Differentiate pass: derive the backward ops from the forward ops.

A gradient is resharded in reverse: if a value is all-gathered, its gradient is reduce-scattered, and vice versa. A
weight's gradient is summed over the axes that split the tokens it processed. The two gradients of a matmul are matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.ir import Array, AttentionOp, Communicate, Elementwise, Matmul, Op, Operand, Region
from meshwright.description.step.passes.nodes import (
    Collected,
    Core,
    Exchange,
    Move,
    Node,
    PassOver,
    Product,
    Vector,
    Weight,
    Work,
    moves_between,
)
from meshwright.record import Phase


def nodes_with_gradients(
    nodes: Iterable[Node], with_gradient: Iterable[str], *, is_at_once: bool
) -> Iterator[tuple[Node, bool]]:
    """Yield (node, whether any of its inputs has a gradient). Backward work that no trained parameter needs is removed.

    Args:
        nodes: nodes of a layer, in order.
        with_gradient: names of the values before the first node that have a gradient.
        is_at_once: whether attention computes all scores at once, in memory, so that compilers can drop unused results.
    """
    found = set(with_gradient)
    for node in nodes:
        read = found.intersection(node.reads)
        if read or node.is_trained:
            found.add(node.writes)
        yield _without_dead_gradients(node, read, is_at_once=is_at_once), bool(read)


def _without_dead_gradients(node: Node, read: set[str], *, is_at_once: bool) -> Node:
    """Return the node with a backward that computes only the gradients of the inputs in `read`.

    is_at_once: as in `nodes_with_gradients`.
    """
    if not read and not node.is_trained:
        return replace(node, saved=()) if node.saved else node
    core = next((work for work in node.work if isinstance(work, Core)), None)
    if core is None or read.issuperset(node.reads):
        return node
    operands: tuple[Operand, ...] = ("query", "key", "value")
    names = dict(zip(operands, node.reads, strict=True))
    gradients = frozenset(operand for operand in operands if names[operand] in read)
    work = tuple(
        replace(each, gradients=gradients) if each is core else each
        for each in node.work
        if not (isinstance(each, Exchange) and each.gradient_of and each.gradient_of not in gradients)
    )
    # The gradient of values needs only the softmax. The gradients of queries and keys also need values and output.
    saved = (names["query"], names["key"]) if is_at_once and gradients == frozenset(("value",)) else node.saved
    return replace(node, work=work, saved=saved)


@lru_cache(maxsize=1 << 12)
def forward_ops(node: Node, phase: Phase = "forward") -> tuple[Op, ...]:
    """Return the ops of a node's forward pass or recomputation, without gathers of weights (`gathers`)."""
    return tuple(_forward(node, phase))


def _forward(node: Node, phase: Phase) -> Iterator[Op]:
    for work in node.work:
        match work:
            case Product():
                if work.passes != "backward":
                    yield _matmul(node, work, phase, "result")
            case Move():
                yield from _moved(work, work.before, work.after, work.name, node.region, phase)
            case Core():
                yield _attention(work, node.region, phase)
            case Exchange() if phase in work.phases and not work.is_end:
                yield _exchanged(work, node.region, phase)
            case PassOver():
                yield Elementwise(kind=work.kind, phase=phase, region=node.region, block=node.block, arrays=work.arrays)
            case _:
                pass


@lru_cache(maxsize=1 << 12)
def backward_ops(node: Node, *, has_input_gradient: bool = True) -> tuple[Op, ...]:
    """Return the backward ops of a node, without the collectives of weight gradients (`scatters`).

    Args:
        node: the node.
        has_input_gradient: whether the node's input needs a gradient, because a parameter before the node is trained.
    """
    return tuple(_backward(node, has_input_gradient))


def _backward(node: Node, has_input_gradient: bool) -> Iterator[Op]:
    for work in node.work:
        if isinstance(work, Product) and work.passes == "forward":
            continue
        if isinstance(work, Product):
            # If the weight has one column, compilers make this gradient an elementwise multiplication.
            if has_input_gradient and math.prod(dim.size or 0 for dim in work.columns) != 1:
                yield _matmul(node, work, "backward", "input_gradient")
            if work.weight is None or work.weight.is_trained:
                yield _matmul(node, replace(work, rows=work.right_rows or work.rows), "backward", "weight_gradient")
        elif has_input_gradient:
            yield from _backward_of_rest(node, work)


def _backward_of_rest(node: Node, work: Work) -> Iterator[Op]:
    """Yield the backward ops of work other than matmuls."""
    match work:
        case Move():
            before = replace(work.before, unreduced=())
            after = replace(work.after, unreduced=work.pending)
            yield from _moved(work, after, before, f"{work.name} gradient", node.region, "backward")
        case Core():
            yield _attention(work, node.region, "backward")
        case Exchange() if "backward" in work.phases:
            yield _exchanged(work, node.region, "backward")
        case PassOver():
            yield Elementwise(
                kind=work.kind, phase="backward", region=node.region, block=node.block, arrays=work.arrays
            )
        case _:
            pass


@lru_cache(maxsize=1 << 14)
def gathers(work: Weight, region: Region, phase: Phase) -> tuple[Communicate, ...]:
    """Return the collectives that gather a weight from its layout in storage to its layout in use."""
    moves = moves_between(work.stored, work.used)
    return tuple(_collected(move, work.name, region, phase, of_weight=True) for move in moves)


@lru_cache(maxsize=1 << 14)
def scatters(work: Weight, region: Region) -> tuple[Communicate, ...]:
    """Return the collectives that sum a weight's gradient over `work.pending`, into the weight's layout in storage."""
    before = replace(work.used, unreduced=work.pending, width="gradient")
    moves = moves_between(before, replace(work.stored, width="gradient"))
    return tuple(_collected(move, work.name, region, "backward", of_weight=True) for move in moves)


@lru_cache(maxsize=1 << 14)
def sums(work: Vector, region: Region) -> tuple[Communicate, ...]:
    """Return the all-reduces of a scale's or bias's gradient, one for each group of axes in `work.pending`.

    JAX's deferred sums (`reduced` types) do not support elementwise products (JAX 0.10.2), so each layer's gradient is
    summed separately.
    """
    return tuple(
        Communicate(
            name=work.name,
            kind="all-reduce",
            axes=axes,
            phase="backward",
            region=region,
            array=work.array,
            of_weight=True,
        )
        for axes in work.pending
        if axes
    )


def _matmul(node: Node, work: Product, phase: Phase, role: str) -> Matmul:
    """Return the op of a matmul in a phase and a role (`Matmul.role`)."""
    return Matmul(
        name=work.name,
        target=node.writes,
        phase=phase,
        region=node.region,
        block=node.block,
        role=role,  # type: ignore[arg-type]
        rows=work.rows,
        inner=work.inner,
        columns=work.columns,
        experts=work.experts,
        is_summed=work.is_summed,
        is_rounded=work.is_rounded,
        is_ring=work.is_ring,
        source=work.source,
        right=work.right,
        stored=work.weight.stored.dims if work.weight else (),
        pending=work.weight.pending if work.weight else (),
    )


def _attention(work: Core, region: Region, phase: Phase) -> AttentionOp:
    """Return the op of attention in a phase."""
    return AttentionOp(
        name=work.op.target,
        phase=phase,
        region=region,
        query=work.query,
        key=work.key,
        value=work.value,
        output=work.output,
        num_heads=work.num_heads,
        qk_dim=work.op.qk_dim,
        value_dim=work.op.value_dim,
        windows=work.op.windows,
        is_chunked=work.op.is_chunked,
        gradients=work.gradients,
        is_sharing=work.op.is_sharing,
    )


def _exchanged(work: Exchange, region: Region, phase: Phase) -> Communicate:
    """Return the `Communicate` op of an `Exchange` in one phase."""
    return Communicate(
        name=work.name,
        kind=work.kind,
        axes=work.axes,
        phase=phase,
        region=region,
        array=work.array,
        times=work.times,
        is_ring=work.is_ring,
        gradient_of=work.gradient_of,
    )


def _moved(work: Move, before: Array, after: Array, name: str, region: Region, phase: Phase) -> Iterator[Communicate]:
    """Yield the collectives of a reshard from `before` to `after`.

    In a collective matmul, those over tp are sends round a ring (S. Wang et al., ASPLOS 2023,
    doi.org/10.1145/3567955.3567959).
    """
    for move in moves_between(before, after):
        op = _collected(move, name, region, phase)
        if work.is_ring and move.axes == ("tp",):
            shard = move.after if move.kind == "reduce-scatter" else move.before
            op = replace(op, kind="collective-permute", array=replace(shard, unreduced=()), is_ring=True)
        yield op


def _collected(move: Collected, name: str, region: Region, phase: Phase, *, of_weight: bool = False) -> Communicate:
    """Return the op of one collective of a reshard."""
    return Communicate(
        name=name,
        kind=move.kind,
        axes=move.axes,
        phase=phase,
        region=region,
        array=move.array,
        before=move.before,
        after=move.after,
        of_weight=of_weight,
    )
