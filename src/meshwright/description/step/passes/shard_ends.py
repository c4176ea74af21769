"""Shard pass outside the layers: the lookup before them, and the logits with their loss after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.ir import Array, Block, Dim, Region, axes_of
from meshwright.description.step.layer import Attention, CrossEntropy, DotProduct, EndOp, Linear, Lookup, Norm, Stack
from meshwright.description.step.layer_inputs import LAYER_INPUT
from meshwright.description.step.parameter_tree import LORA_A, LORA_B, RANK
from meshwright.description.step.passes.nodes import (
    Exchange,
    Layout,
    Move,
    Node,
    PassOver,
    Product,
    Vector,
    Work,
    outermost_first,
    shared_keys,
    weight_of,
)
from meshwright.description.step.passes.shard_low_rank import factor
from meshwright.description.step.workload import Objective

EMBEDDING, LOGITS = Region("embedding"), Region("logits")


@lru_cache(maxsize=1 << 10)
def embedding_nodes(ops: tuple[EndOp, ...], layout: Layout) -> tuple[Node, ...]:
    """Return the nodes before the layers. Devices that split a table's rows look up the same tokens and add results."""
    return tuple(_embedding_nodes(ops, layout))


def _embedding_nodes(ops: tuple[EndOp, ...], layout: Layout) -> Iterator[Node]:
    vocab = layout.axes("vocab")
    for op in ops:
        match op:
            case Lookup():
                # Positions are looked up for a device's tokens of the residual stream, ids for those inside blocks.
                tokens = layout.residual_tokens if op.is_positional else layout.tokens
                work: list[Work] = [weight_of(op.name, (op.rows, op.columns), axes_of(tokens), layout)]
                if not op.is_positional:
                    work += _sum_of_rows("embedding", Dim("D", op.columns[1]), layout, vocab)
                yield _node(EMBEDDING, Block.EMBEDDING, *work, writes=op.target)
                if op.low_rank:
                    low, name = (RANK, op.low_rank.rank), "embedding low rank"
                    weight = weight_of(f"{op.name}{LORA_A}", (op.rows, low), axes_of(layout.tokens), layout)
                    moves = _sum_of_rows(name, layout.used((low,))[0], layout, vocab)
                    yield _node(EMBEDDING, Block.EMBEDDING, weight, *moves, writes=name)
                    out = factor(f"{op.name}{LORA_B}", layout.residual_tokens, (low,), (op.columns,), layout)
                    added = PassOver(
                        kind="low_rank", arrays=(Array(op.target, (*layout.residual_tokens, *out[1].columns)),)
                    )
                    yield _node(EMBEDDING, Block.EMBEDDING, *out, added, writes=op.target)
            case Norm():
                yield _node(EMBEDDING, Block.EMBEDDING, *_scales(op, layout), writes=op.target)
            case _:
                pass


@lru_cache(maxsize=1 << 10)
def shared_key_nodes(stack: Stack, layout: Layout) -> tuple[Node, ...]:
    """Return the nodes that gather an earlier layer's keys and values over sp, once for all layers of a stack."""
    moves = (
        Move(name="shared keys", before=before, after=after, pending=layout.sequence)
        for op in stack.ops
        if isinstance(op, Attention) and op.is_sharing
        for before, after in shared_keys(op, layout)
        if before != after
    )
    return tuple(_node(EMBEDDING, Block.ATTENTION, move, writes=move.after.name) for move in moves)


@lru_cache(maxsize=1 << 10)
def residual_nodes(ops: tuple[EndOp, ...], layout: Layout) -> tuple[Node, ...]:
    """Return the nodes of ops outside the layers in the layout of the residual stream.

    They compute each layer's own input, or before and after the layers the streams of AltUp but the first.
    """
    return tuple(_residual_nodes(ops, layout))


def _residual_nodes(ops: tuple[EndOp, ...], layout: Layout) -> Iterator[Node]:
    for op in ops:
        match op:
            case Lookup():
                weight = weight_of(op.name, (op.rows, op.columns), axes_of(layout.tokens), layout)
                moves = _rows_of_columns(layout.used((op.columns,))[0], layout)
                yield _node(EMBEDDING, Block.EMBEDDING, weight, *moves, writes=op.target)
            case Linear():
                dims = (*op.inputs, *op.outputs)
                weight = weight_of(op.name, dims, axes_of(layout.residual_tokens), layout)
                product = Product(
                    name=op.name,
                    rows=layout.residual_tokens,
                    inner=layout.used(op.inputs),
                    columns=layout.used(op.outputs),
                    source=op.source,
                    weight=weight,
                )
                made = Array(op.target, (*product.rows, *product.columns))
                passes = PassOver(kind="norm", arrays=(made,)), PassOver(kind="residual", arrays=(made,))
                yield _node(EMBEDDING, Block.EMBEDDING, weight, product, *passes, writes=op.target)
            case Norm():
                yield _node(EMBEDDING, Block.EMBEDDING, *_scales(op, layout), writes=op.target)
            case _:
                pass


def _rows_of_columns(columns: Dim, layout: Layout) -> Iterator[Work]:
    """Yield the collectives of a lookup whose table is not gathered.

    Devices that split its columns get the tokens of all of them, and send each other the columns of their tokens. The
    rows of devices that split the vocabulary are added before.
    """
    name, vocab, sent = LAYER_INPUT, layout.axes("vocab"), columns.axes
    batch, tokens = (dim._replace(axes=tuple(axis for axis in dim.axes if axis not in sent)) for dim in layout.tokens)
    if sent:
        ids = Array("tokens", (batch, tokens), width="float32")
        yield Exchange(name="tokens", kind="all-gather", axes=sent, array=ids, phases=("forward",))
    over = tuple(axis for axis in vocab if axis in layout.residual)
    before = Array(name, (batch, tokens, columns), vocab)
    after = replace(before, dims=(batch, tokens._replace(axes=over), columns), unreduced=())
    yield Move(name=name, before=before, after=after)
    if sent:
        rows = Array(name, (*layout.residual_tokens, columns._replace(axes=())))
        yield Exchange(name=name, kind="all-to-all", axes=sent, array=rows, phases=("forward", "backward"))


def _sum_of_rows(name: str, columns: Dim, layout: Layout, split: tuple[str, ...]) -> Iterator[Move]:
    """Yield the reshards that add looked up rows over the axes that split the table (`split`).

    The results have the layout of the residual stream. They are reduce-scattered along the sequence, then along the
    batch, and all-reduced over any other axes.
    """
    batch = tuple(axis for axis in layout.batch if axis != "pp") if "pp" in split else layout.batch
    lead = Dim("B", None, batch), Dim("S", None, layout.sequence)
    at_sequence = Dim("S", None, layout.residual)
    before = Array(name, (*lead, columns), split)
    left = tuple(axis for axis in split if axis not in layout.residual)
    middle = Array(name, (lead[0], at_sequence, columns), left)
    yield Move(name=name, before=before, after=middle)
    yield Move(name=name, before=middle, after=Array(name, (Dim("B", None, layout.batch), at_sequence, columns)))


def _branch_of_logits(op: Linear, layout: Layout, vocab: tuple[str, ...]) -> Iterator[Node]:
    """Yield the nodes of the logits' low-rank branch. Its inner value is gathered over tp, as in a layer."""
    assert op.low_rank
    low, name = (RANK, op.low_rank.rank), "logits low rank"
    inner = factor(f"{op.branch}{LORA_A}", layout.residual_tokens, op.inputs, (low,), layout)
    read = Array(op.source, (*layout.residual_tokens, *inner[1].inner))
    dropped = (PassOver(kind="low_rank_dropout", arrays=(read,)),) if op.low_rank.dropout else ()
    yield _node(LOGITS, Block.LOGITS, *dropped, *inner, writes=name)
    before, after = (Array(name, (*rows, *inner[1].columns)) for rows in (layout.residual_tokens, layout.tokens))
    yield _node(LOGITS, Block.LOGITS, Move(name=name, before=before, after=after, pending=vocab), writes=name)
    out = factor(f"{op.branch}{LORA_B}", layout.tokens, (low,), op.outputs, layout)
    added = PassOver(kind="low_rank", arrays=(Array(op.target, (*layout.tokens, *out[1].columns), width="float32"),))
    yield _node(LOGITS, Block.LOGITS, *out, added, writes=op.target)


@lru_cache(maxsize=1 << 10)
def logits_nodes(ops: tuple[EndOp, ...], layout: Layout, objective: Objective) -> tuple[Node, ...]:
    """Return the nodes of the final norm, the logits and the loss.

    Over a split vocab, the loss all-reduces each token's maximum, sum of exponentials and target logit.
    """
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
                weight = weight_of(op.name, dims, axes_of(layout.tokens), layout)
                product = Product(
                    name=op.name,
                    rows=layout.tokens,
                    inner=layout.used(op.inputs),
                    columns=layout.used(op.outputs),
                    source=op.source,
                    weight=weight,
                )
                logits = Array(op.target, (*product.rows, *product.columns), width="float32")
                biases = [_bias(op, layout)] if op.has_bias else []
                yield _node(LOGITS, Block.LOGITS, entry, weight, product, *biases, writes=op.target)
                if op.low_rank:
                    yield from _branch_of_logits(op, layout, vocab)
            case DotProduct():
                node, logits = _dot_product(op, layout)
                yield node
            case CrossEntropy():
                assert logits, "a loss has logits before it"
                yield from _loss(layout, vocab, logits, objective)
            case _:
                pass


def _dot_product(op: DotProduct, layout: Layout) -> tuple[Node, Array]:
    """Return the node of a `DotProduct`, and the logits. Their columns, one per row of `right`, are split over tp."""
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
        Move(name=op.right, before=right, after=whole, pending=outermost_first(axes_of(layout.tokens))),
        product,
    )
    logits = Array(op.target, (*product.rows, *product.columns), width="float32")
    return _node(LOGITS, Block.LOGITS, *work, writes=op.target), logits


LOSS = "loss"
"""Name of the all-reduce of the loss (with dpo, of the loss and its metrics)."""

PAIR_MEANS = 7
"""How many means over pairs a step of dpo computes: the loss and six metrics (`training.preference`)."""


def _loss(layout: Layout, vocab: tuple[str, ...], logits: Array, objective: Objective) -> Iterator[Node]:
    """Yield the node of the loss: its softmax over a vocab that may be split, and its mean over tokens.

    Target logits are not recomputed. With dpo, log-probabilities are summed over each sequence, and the loss is a mean
    over pairs.
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
    """Yield a `Vector` for the scale, and one for the bias if any, of a norm outside the layers.

    The norm's own memory traffic is counted with the logits.
    """
    for name in (op.name, *((f"{op.name}_bias",) if op.has_bias else ())):
        along = layout.residual
        yield Vector(
            name=name,
            array=Array(name, (Dim("N", op.size),), width="float32"),
            pending=(along, outermost_first(layout.batch)),
            is_trained=name not in layout.frozen,
        )


def _bias(op: Linear, layout: Layout) -> Vector:
    """Return the bias of the logits, which is added in float32."""
    name, used = f"{op.name}_bias", layout.used(op.outputs)
    split = {axis for dim in used for axis in dim.axes}
    batch, *others = (outermost_first(axis for axis in dim.axes if axis not in split) for dim in layout.tokens)
    return Vector(
        name=name,
        array=Array(name, used, width="float32"),
        pending=(*others, batch),
        is_trained=name not in layout.frozen,
    )


def _node(region: Region, block: Block, *work: Work, writes: str) -> Node:
    """Return a node outside the layers."""
    return Node(region=region, block=block, work=work, writes=writes)
