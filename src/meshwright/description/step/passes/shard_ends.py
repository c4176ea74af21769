"""Shard pass for what stands before and after the layers: the lookup, and the logits with their loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.ir import Array, Block, Dim, Region
from meshwright.description.step.layer import CrossEntropy, DotProduct, EndOp, Linear, Lookup, Norm
from meshwright.description.step.passes.nodes import (
    Exchange,
    Layout,
    Move,
    Node,
    PassOver,
    Product,
    Vector,
    Weight,
    Work,
    outermost_first,
)
from meshwright.description.step.workload import Objective

EMBEDDING, LOGITS = Region("embedding"), Region("logits")


@lru_cache(maxsize=1 << 10)
def embedding_nodes(ops: tuple[EndOp, ...], layout: Layout) -> tuple[Node, ...]:
    """The lookup in a table whose rows may be split: each device has the tokens of all that share it, and sums."""
    return tuple(_embedding_nodes(ops, layout))


def _embedding_nodes(ops: tuple[EndOp, ...], layout: Layout) -> Iterator[Node]:
    vocab = layout.axes("vocab")
    for op in ops:
        match op:
            case Lookup():
                yield _lookup(op, layout, () if op.is_positional else vocab)
            case Norm():
                yield _node(EMBEDDING, Block.EMBEDDING, *_scales(op, layout), writes=op.target)
            case _:
                pass


def _lookup(op: Lookup, layout: Layout, split: tuple[str, ...]) -> Node:
    """The table on its way to its use, and the rows found summed onto the residual stream."""
    columns = Dim("D", op.columns[1])
    # Positions are looked up for the tokens that a device has between blocks, ids for those of products.
    tokens = layout.residual_tokens if op.is_positional else layout.tokens
    work: list[Work] = [_weight(op.name, (op.rows, op.columns), layout, _over_tokens(tokens))]
    if not op.is_positional:
        # Onto shares of the sequence first, then of the sequences, over other axes onto copies.
        batch = tuple(axis for axis in layout.batch if axis != "pp") if "pp" in split else layout.batch
        lead = Dim("B", None, batch), Dim("S", None, layout.sequence)
        at_sequence = Dim("S", None, layout.residual)
        before = Array("embedding", (*lead, columns), split)
        left = tuple(axis for axis in split if axis not in layout.residual)
        middle = Array("embedding", (lead[0], at_sequence, columns), left)
        after = Array("embedding", (Dim("B", None, layout.batch), at_sequence, columns))
        work += [
            Move(name="embedding", before=before, after=middle),
            Move(name="embedding", before=middle, after=after),
        ]
    return _node(EMBEDDING, Block.EMBEDDING, *work, writes=op.target)


@lru_cache(maxsize=1 << 10)
def logits_nodes(ops: tuple[EndOp, ...], layout: Layout, objective: Objective) -> tuple[Node, ...]:
    """The final norm, the logits, and the loss, of a split vocab each token's maximum, sum and target's logit."""
    return tuple(_logits_nodes(ops, layout, objective))


def _logits_nodes(ops: tuple[EndOp, ...], layout: Layout, objective: Objective) -> Iterator[Node]:
    vocab, logits = layout.axes("vocab"), None
    for op in ops:
        match op:
            case Norm():
                yield _node(LOGITS, Block.LOGITS, *_scales(op, layout), writes=op.target)
            case Linear():
                width = Dim("D", op.inputs[0][1])
                residual = Array("logits input", (*layout.residual_tokens, width))
                whole = replace(residual, dims=(*layout.tokens, width))
                entry = Move(name="logits input", before=residual, after=whole, pending=vocab)
                dims = (*op.outputs, *op.inputs) if op.is_tied else (*op.inputs, *op.outputs)
                weight = _weight(op.name, dims, layout, _over_tokens(layout.tokens))
                product = Product(
                    name=op.name,
                    rows=layout.tokens,
                    inner=layout.used(op.inputs),
                    columns=layout.used(op.outputs),
                    source=op.source,
                    weight=weight,
                )
                logits = Array(op.target, (*product.rows, *product.columns), width="float32")
                yield _node(LOGITS, Block.LOGITS, entry, weight, product, writes=op.target)
            case DotProduct():
                node, logits = _dot_product(op, layout)
                yield node
            case CrossEntropy():
                assert logits, "a loss has logits before it"
                yield from _loss(layout, vocab, logits, objective)
            case _:
                pass


def _dot_product(op: DotProduct, layout: Layout) -> tuple[Node, Array]:
    """Yield the product of every row with every row of the batch, the right ones split over tp; and the logits."""
    split, width = layout.axes("vocab"), Dim("D", op.size)
    left = Array(op.left, (*layout.residual_tokens, width))
    right = replace(left, name=op.right)
    batch, tokens = layout.tokens
    whole = replace(right, dims=(batch._replace(axes=()), tokens._replace(axes=split), width))
    product = Product(
        name=op.name,
        rows=layout.tokens,
        inner=(width,),
        columns=(Dim("I", None, split),),
        source=op.left,
        right=op.right,
    )
    work = (
        Move(name=op.left, before=left, after=replace(left, dims=(*layout.tokens, width)), pending=split),
        Move(name=op.right, before=right, after=whole, pending=_over_tokens(layout.tokens)),
        product,
    )
    logits = Array(op.target, (*product.rows, *product.columns), width="float32")
    return _node(LOGITS, Block.LOGITS, *work, writes=op.target), logits


LOSS = "loss"
"""Mean over a step's tokens, or over its pairs with the means of their measurements."""

PAIR_MEANS = 7
"""The numbers that a step of dpo takes the mean of over its pairs: the loss and six metrics (`training.preference`)."""


def _loss(layout: Layout, vocab: tuple[str, ...], logits: Array, objective: Objective) -> Iterator[Node]:
    """The softmax over a split vocab, and the mean over tokens. The target's logit is not recomputed.

    Of dpo the sum over each sequence, and the mean over pairs.
    """
    tokens = Array("softmax", layout.tokens, width="float32")
    work: list[Work] = [PassOver(kind="loss", arrays=(logits,))]
    if vocab:
        recompute = Exchange(
            name="softmax", kind="all-reduce", axes=vocab, array=tokens, phases=("recompute",), times=2
        )
        work += [replace(recompute, phases=("forward",), times=3), recompute]
    over_sequence, over_batch = layout.sequence, tuple(axis for axis in layout.batch if axis != "pp")
    if objective == "dpo":
        sums = Array("log-probabilities", layout.tokens[:1], width="float32")
        means = Array(LOSS, (Dim("N", PAIR_MEANS),), width="float32")
        moves = ((sums, over_sequence), (means, over_batch))
    else:
        total = Array(LOSS, (Dim("loss", None),), width="float32")
        moves = ((total, over_sequence), (total, over_batch))
    work += [
        Exchange(name=array.name, kind="all-reduce", axes=axes, array=array, phases=("forward",))
        for array, axes in moves
        if axes
    ]
    yield _node(LOGITS, Block.LOGITS, *work, writes="loss")


def _scales(op: Norm, layout: Layout) -> Iterator[Work]:
    """The scale and bias of a norm of the residual stream; the pass itself is counted with the logits'."""
    for name in (op.name, *((f"{op.name}_bias",) if op.has_bias else ())):
        along = layout.residual
        yield Vector(
            name=name,
            array=Array(name, (Dim("N", op.size),), width="float32"),
            pending=(along, outermost_first(layout.batch)),
            is_trained=name not in layout.frozen,
        )


def _weight(name: str, dims: tuple[tuple[str, int], ...], layout: Layout, pending: tuple[str, ...]) -> Weight:
    """A table on its way to its use."""
    used = layout.used(dims)
    split = {axis for dim in used for axis in dim.axes}
    return Weight(
        name=name,
        stored=Array(name, layout.stored(dims)),
        used=Array(name, used),
        pending=tuple(axis for axis in pending if axis not in split),
        is_trained=name not in layout.frozen,
    )


def _over_tokens(dims: tuple[Dim, ...]) -> tuple[str, ...]:
    """The axes that split tokens."""
    return outermost_first(axis for dim in dims for axis in dim.axes)


def _node(region: Region, block: Block, *work: Work, writes: str) -> Node:
    """A node outside of the layers."""
    return Node(region=region, block=block, work=work, writes=writes)
