"""Ops of a server's step outside the layers, and how arrays of such a step are resharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.description.step.ir import (
    Array,
    Block,
    Communicate,
    Dim,
    Elementwise,
    Matmul,
    Op,
    Pass,
    Region,
    axes_of,
)
from meshwright.description.step.layer import EndOp, Linear, Lookup, Norm
from meshwright.description.step.parameter_tree import LORA_A, LORA_B
from meshwright.description.step.passes.nodes import Layout, moves_between

LOGITS, EMBEDDING = Region("logits"), Region("embedding")


def embedding_ops(ops: Iterable[EndOp], layout: Layout, stored: Layout) -> Iterator[Op]:
    """Yield the collectives of a lookup in a table whose rows are split, and the gather of its stored columns."""
    for op in ops:
        if isinstance(op, Lookup):
            before, table = (Array(op.name, of.stored((op.rows, op.columns))) for of in (stored, layout))
            yield from moved(op.name, EMBEDDING, (before, table), of_weight=True)
        if isinstance(op, Lookup) and not op.is_positional:
            columns = layout.stored((op.columns,))
            rows = Array("embedding", (*layout.tokens, *columns), layout.axes("vocab"))
            yield from moved("embedding", EMBEDDING, (rows, Array("embedding", (*layout.residual_tokens, *columns))))
            if op.low_rank:
                # The rows of all slots' branches are summed over devices like the table's, then multiplied by B.
                low = layout.stored(op.low_rank.dims)
                rows = Array("embedding low rank", (*layout.tokens, *low), layout.axes("vocab"))
                yield from moved(rows.name, EMBEDDING, (rows, Array(rows.name, (*layout.residual_tokens, *low))))
                yield Matmul(
                    name=f"{op.name}{LORA_B}", target=op.target, phase="forward", region=EMBEDDING,
                    block=Block.EMBEDDING, role="result", rows=layout.residual_tokens, inner=low, columns=columns,
                )  # fmt: skip


def layer_input_ops(ops: Iterable[EndOp], layout: Layout, stored: Layout, *, are_streams: bool = False) -> Iterator[Op]:
    """Yield the ops that compute each layer's own input: a lookup in a table that is not gathered, and a projection.

    Over fsdp that splits the tokens, these are sent to all columns of the table, and rows back; else rows are gathered.

    are_streams: whether results of projections are residual streams, which fsdp splits.
    """
    for op in ops:
        if isinstance(op, Lookup):
            columns, vocab = layout.stored((op.columns,))[0], layout.axes("vocab")
            is_sent = bool(columns.axes) and {*columns.axes} <= {*layout.batch}
            batch, tokens = layout.tokens
            batch = whole_dim(batch, columns.axes) if is_sent else batch
            if is_sent:
                ids = Array("tokens", layout.tokens, width="float32")
                yield from moved(ids.name, EMBEDDING, (ids, replace(ids, dims=(batch, tokens))))
            before = Array(op.target, (batch, tokens, columns), vocab)
            at_tokens = tokens._replace(axes=layout.residual_tokens[1].axes)
            summed = replace(before, dims=(batch, at_tokens, columns), unreduced=())
            after = replace(summed, dims=(*layout.residual_tokens, columns._replace(axes=())))
            yield from moved(op.target, EMBEDDING, (before, summed))
            yield from moved(op.target, EMBEDDING, (summed, after))
        if isinstance(op, Linear):
            before, used = (Array(op.name, (*of.stored(op.inputs), *of.stored(op.outputs))) for of in (stored, layout))
            yield from moved(op.name, EMBEDDING, (before, used), of_weight=True)
            inner, made = layout.stored(op.inputs), layout.stored(op.outputs)
            yield Matmul(
                name=op.name, target=op.target, phase="forward", region=EMBEDDING, block=Block.EMBEDDING, role="result",
                rows=layout.residual_tokens, inner=inner, columns=made,
            )  # fmt: skip
            sums = Array(op.target, (*layout.residual_tokens, *made), axes_of(inner))
            after = split_dim(sums, -1, layout.axes("embed")) if are_streams else reduced(sums)
            yield from moved(op.name, EMBEDDING, (sums, after))
            passes: tuple[Pass, ...] = ("norm", "residual")
            for kind in passes:
                yield Elementwise(kind=kind, phase="forward", region=EMBEDDING, block=Block.EMBEDDING, arrays=(after,))


def stream_ops(ops: tuple[EndOp, ...], layout: Layout, stored: Layout) -> Iterator[Op]:
    """Yield the ops of AltUp's streams before or after the layers, which are scaled to the size of the first one."""
    yield from layer_input_ops(ops, layout, stored, are_streams=True)
    for name in ("first stream", *(op.target for op in ops if isinstance(op, Linear))) if ops else ():
        squares = Array("squares", layout.residual_tokens, layout.axes("embed"), width="float32")
        yield from moved(name, EMBEDDING, (squares, reduced(squares)))


def logits_ops(ops: Iterable[EndOp], prompts: Layout, layout: Layout) -> Iterator[Op]:
    """Yield the ops of each sequence's logits at its last token, and of the most likely token in each vocab shard.

    prompts: the layout of the layers before, from which last tokens come.
    """
    batch, vocab = layout.tokens[0], layout.axes("vocab")
    for op in ops:
        if isinstance(op, Norm):
            yield from norm_sums(op, "final norm", LOGITS, (batch,), layout.axes("embed"))
        if isinstance(op, Linear):
            inner, columns = layout.stored(op.inputs), layout.stored(op.outputs)
            if layout.tp_stream == "split":
                # The last token of a sequence is on one of the devices that split its tokens.
                last = Array("stream", (prompts.tokens[0], *prompts.stored(op.inputs)), vocab)
                yield from moved("last tokens", LOGITS, (last, reduced(last)))
                yield from moved("last tokens", LOGITS, (reduced(last), Array("stream", (batch, *inner))))
            yield Matmul(
                name=op.name, target=op.target, phase="forward", region=LOGITS, block=Block.LOGITS, role="result",
                rows=(batch,), inner=inner, columns=columns,
            )  # fmt: skip
            if op.low_rank:
                low = layout.stored(op.low_rank.dims)
                for name, read, made in ((LORA_A, inner, low), (LORA_B, low, columns)):
                    yield Matmul(
                        name=f"{op.branch}{name}", target=op.target, phase="forward", region=LOGITS, block=Block.LOGITS,
                        role="result", rows=(batch,), inner=read, columns=made,
                    )  # fmt: skip
            logits = Array("logits", (batch, *columns), axes_of(inner), width="float32")
            yield from moved("logits", LOGITS, (logits, reduced(logits)))
            # The dim `best` has a logit and a token id.
            best = Array("best tokens", (batch, Dim("best", 2), Dim("P", None, vocab)), width="float32")
            yield from moved("best tokens", LOGITS, (best, gathered(best, vocab)))
            if layout.tp_stream == "whole":
                # Every device gets the newest token of every row, which is the row's input in the next step.
                newest = Array("newest tokens", (batch,), width="float32")
                yield from moved("newest tokens", LOGITS, (newest, gathered(newest, layout.axes("batch"))))


def norm_sums(op: Norm, name: str, region: Region, tokens: tuple[Dim, ...], axes: tuple[str, ...]) -> Iterator[Op]:
    """Yield the all-reduces of a norm whose dim is split over `axes`: of squares; for a LayerNorm, of means first."""
    for what in ("mean", "squares") if op.kind == "layer" else ("squares",):
        sums = Array(what, tokens, axes, width="float32")
        yield from moved(name, region, (sums, reduced(sums)))


def moved(name: str, region: Region, *pairs: tuple[Array, Array], of_weight: bool = False) -> Iterator[Communicate]:
    """Yield the collectives that reshard several arrays alike, each collective combined over all arrays.

    pairs: (before, after) of each array.
    """
    for first, *beside in zip(*(moves_between(*pair) for pair in pairs), strict=True):
        yield Communicate(
            name=name, kind=first.kind, axes=first.axes, phase="forward", region=region, array=first.array,
            of_weight=of_weight, beside=tuple(move.array for move in beside),
        )  # fmt: skip


def reduced(array: Array) -> Array:
    """Return the array after its partial sums over all axes are added."""
    return replace(array, unreduced=())


def split_dim(array: Array, index: int, axes: tuple[str, ...]) -> Array:
    """Return an array after its partial sums are added and its dim number `index` is split over `axes` too."""
    dims = list(array.dims)
    dims[index] = dims[index]._replace(axes=(*dims[index].axes, *axes))
    return replace(array, dims=tuple(dims), unreduced=())


def gathered(array: Array, axes: tuple[str, ...]) -> Array:
    """Return an array after it is gathered over some axes and its partial sums are added."""
    return replace(array, dims=tuple(whole_dim(dim, axes) for dim in array.dims), unreduced=())


def whole_dim(dim: Dim, axes: tuple[str, ...]) -> Dim:
    """Return a dim with `axes` removed."""
    return dim._replace(axes=tuple(axis for axis in dim.axes if axis not in axes))
