"""The ops of a server's step on weight-stationary layouts in one and two dims (arXiv:2211.05102).

The stream is split over fsdp. The first products of a block are summed over fsdp, its last over sp and tp; with fsdp=1
that is Megatron's layout in one dim. Of prompts the stream is split over sp and tp too, along the tokens. A cache split
by batch or sequence moves queries to where it lies and what comes out of attention back (arXiv:2211.05102, section 3.3;
scaling book, jax-ml.github.io/scaling-book/inference).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from meshwright.record import Kind
from meshwright.step.blocks import program
from meshwright.step.ir import (
    Array,
    AttentionOp,
    Block,
    Communicate,
    Dim,
    Elementwise,
    Matmul,
    Op,
    Ops,
    Pass,
    Region,
)
from meshwright.step.layer import (
    STREAM,
    Add,
    Attention,
    Dispatch,
    EndOp,
    Gated,
    Linear,
    Lookup,
    Norm,
    Rotary,
    Slice,
)
from meshwright.step.layer import Block as LayerBlock
from meshwright.step.model import ModelConfig
from meshwright.step.passes.nodes import Layout
from meshwright.step.serving import SERVING_RULES, TENSOR_AXES, CacheSplit, ServingPhase

LOGITS, EMBEDDING = Region("logits"), Region("embedding")


@lru_cache(maxsize=1 << 10)
def serving_ops(
    model: ModelConfig, phase: ServingPhase, split: CacheSplit, live: frozenset[str]
) -> tuple[Ops, Mapping[str, tuple[Array, ...]]]:
    """The ops of a step, and what is live at once: they depend on which axes are larger than 1, not on any number."""
    found = program(model)

    def on(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in live)

    layout = Layout(
        rules=SERVING_RULES,
        live=live,
        batch=on(SERVING_RULES["batch"]),
        sequence=(),
        residual=on(TENSOR_AXES) if phase == "prefill" else (),
        sp_method="gather",
        has_positions=False,
        is_pair=False,
        collective_matmul=False,
        tp_stream="split" if phase == "prefill" else "whole",
        dropout=False,
    )
    ops: list[Op] = list(_embedding(found.embedding, layout))
    arrays: dict[str, tuple[Array, ...]] = {}
    for stack in found.stacks:
        region = Region(stack.name)
        walks = [_BlockWalk(block, region, layout, split) for block in stack.blocks]
        for walk in walks:
            ops += walk.ops()
        stream = Array(STREAM, (*layout.tokens, walks[0].width))
        # The stream, and a block's input gathered.
        arrays[stack.name] = (stream, stream, *(array for walk in walks for array in walk.live))
    ops += _logits(found.logits, layout)
    arrays[LOGITS.name] = tuple(_logit_arrays(found.logits, layout))
    return Ops(tuple(ops)), arrays


class _BlockWalk:
    """The ops of one block: where the values lie, op by op."""

    def __init__(self, block: LayerBlock, region: Region, layout: Layout, split: CacheSplit) -> None:
        self.block, self.region, self.layout, self.split = block, region, layout, split
        self.part = Block.MLP if block.name == "mlp" else Block.ATTENTION
        self.fsdp, self.tensor = layout.axes("embed"), layout.axes("mlp")
        self.is_prefill = layout.tp_stream == "split"
        norm = next(op for op in block.ops if isinstance(op, Norm))
        self.width = Dim("D", norm.size, self.fsdp)
        self.linears = {op.target: op for op in block.ops if isinstance(op, Linear)}
        self.arrays: dict[str, Array] = {}
        self.live: list[Array] = []

    def ops(self) -> Iterator[Op]:
        """The ops in order."""
        residual = Array(STREAM, (*self.layout.residual_tokens, self.width))
        yield from self._stream(residual)
        for op in self.block.ops:
            match op:
                case Linear():
                    yield from self._linear(op)
                case Attention():
                    yield from self._attention(op)
                case Gated():
                    yield from self._gated(op)
                case Dispatch():
                    yield from self._dispatch()
                case Add():
                    # Of parallel blocks the outputs of attention and of the MLP are added one after the other.
                    for _ in range(2 if self.block.name == "block" else 1):
                        yield self._pass("residual", residual)
                case _:
                    pass
        if hidden := [self.arrays[op.target] for op in self.block.ops if isinstance(op, Gated)]:
            sources = max(len(op.sources) for op in self.block.ops if isinstance(op, Gated))
            yield self._pass("gated" if sources > 1 else "activation", *hidden)

    def _stream(self, residual: Array) -> Iterator[Op]:
        """The stream's norm, once for all that read it, and the stream into and out of the block.

        Of a token each sum is one all-reduce and not two collectives, which is what counts where there is little to
        send. Norms of heads and of a block's output are in the passes beside them.
        """
        name = self.block.name
        stream = Array(STREAM, (*self.layout.tokens, self.width))
        yield self._pass("norm", residual)
        yield from self._move(f"{name} norm", "all-reduce", self.fsdp, _wide("squares", self.layout.tokens))
        if self.is_prefill:
            yield from self._move(f"{name} input", "all-gather", self.tensor, stream)
            yield from self._move(f"{name} output", "reduce-scatter", self.tensor, stream)
        else:
            yield from self._move(f"{name} output", "all-reduce", self.tensor, stream)

    def _linear(self, op: Linear) -> Iterator[Op]:
        """A product with a weight that stays where it is."""
        inner, columns, tokens = self.layout.stored(op.inputs), self.layout.stored(op.outputs), self.layout.tokens
        experts = (Dim("A", None),) if op.num_experts else ()
        rows = (Dim("R", None),) if op.num_experts else tokens
        yield Matmul(
            name=f"{self.region.name}.{op.name}", target=op.target, phase="forward", region=self.region,
            block=self.part, role="result", rows=rows, inner=inner, columns=columns, experts=experts,
        )  # fmt: skip
        self.arrays[op.target] = Array(op.target, (*tokens, *columns))
        if op.is_on_residual:
            yield from self._move("router", "all-reduce", self.fsdp, replace(self.arrays[op.target], width="float32"))

    def _gated(self, op: Gated) -> Iterator[Op]:
        """Hidden activations: the first products' sums scattered over fsdp, and gathered again once multiplied."""
        copies = next((each.num_active for each in self.block.ops if isinstance(each, Dispatch)), 1)
        is_of_experts = self.linears[op.sources[0]].num_experts > 0
        sources = [self.arrays[name] for name in op.sources]
        if is_of_experts:
            # One more dim before the last: a token's experts.
            sources = [replace(array, dims=(*array.dims[:-1], Dim("K", copies), array.dims[-1])) for array in sources]
        self.arrays[op.target] = hidden = sources[0]
        self.live += sources
        yield from self._move("mlp hidden", "reduce-scatter", self.fsdp, *sources)
        yield from self._move("mlp hidden", "all-gather", self.fsdp, hidden)

    def _dispatch(self) -> Iterator[Op]:
        """Tokens on their way to the devices of their experts and back, once to each device that has any of them.

        Every device of sp and tp sends its part of a token, which is gathered where it arrives, and summed onto parts
        before it goes back.
        """
        batch, tokens, expert = self.layout.tokens[0], self.layout.tokens[1], self.layout.axes("expert")
        if not expert:
            return
        sent = Array("sent", (batch, tokens, Dim("C", None), self.width))
        part = replace(sent, dims=(batch, tokens._replace(axes=self.tensor), *sent.dims[2:]))
        for name in ("dispatch", "combine"):
            yield from self._move(f"experts {name}", "all-to-all", expert, part)
        yield from self._move("experts input", "all-gather", self.tensor, sent)
        yield from self._move("experts output", "reduce-scatter", self.tensor, sent)

    def _attention(self, op: Attention) -> Iterator[Op]:
        """Attention, and queries, keys and values on their way to the cache, and what comes back."""
        query = self.arrays[op.query]
        output = replace(query, name=op.target, dims=(*query.dims[:-1], Dim("H", op.value_dim)))
        self.live += [query, output]
        latents = self._latents(op)
        cached = latents or (self.arrays[op.key], self.arrays[op.value])
        if any(isinstance(each, Rotary) for each in self.block.ops):
            # Taken as if sp shared out the rotation of keys too, of which each of its devices has all.
            keys = Array(op.key, (*self.layout.tokens, Dim("N", op.num_kv_heads, self.tensor), Dim("H", op.qk_dim)))
            yield self._pass("rotary", query, keys)
        if latents:
            sums = [self.arrays[each] for each in self._reads_of_stream()]
            yield from self._move("latents", "all-reduce", self.fsdp, *sums)
        else:
            kind: Kind = "reduce-scatter" if self.is_prefill or self.split == "batch" else "all-reduce"
            yield from self._move("queries, keys and values", kind, self.fsdp, query, *cached)
        held = tuple(
            Array(array.name, (Dim("Q", None), Dim("T", None), *array.dims[len(self.layout.tokens) :]))
            for array in cached
        )
        # Groups and their heads as one dim.
        heads = Dim("N", op.num_heads, tuple(axis for dim in query.dims[2:] for axis in dim.axes))
        score, value = op.qk_dim, op.value_dim
        if self.is_prefill:
            batch, tokens = self.layout.tokens
            if not latents:
                # Each device of fsdp takes some queries, and all keys and values before them.
                yield from self._move("keys and values", "all-gather", self.fsdp, *cached)
                yield from self._move("heads", "all-gather", self.fsdp, output)
                tokens = tokens._replace(axes=self.fsdp)
            queries = replace(query, dims=(batch, tokens, heads, Dim("H", score)))
        else:
            if latents:
                # Queries are multiplied into the latent, and results out of it, by weights that are products of their
                # own (DeepSeek-V2, arXiv:2405.04434, section 2.1.2), so that the latent alone is read.
                score, value = sum(array.dims[-1].size or 0 for array in latents), latents[0].dims[-1].size or 0
                query, output = (
                    replace(array, dims=(*self.layout.tokens, heads, Dim("H", size)))
                    for array, size in ((query, score), (output, value))
                )
            across = tuple(axis for axis in self.tensor if axis not in {a for each in held for a in each.split_axes})
            yield from self._to_cache(query, output, across)
            if self.split != "heads":
                heads = _whole(heads, across)
            queries = Array(op.query, (Dim("Q", None), heads, Dim("H", score)))
        yield AttentionOp(
            name=op.target, phase="forward", region=self.region, query=queries, key=held[0], value=held[-1],
            output=output, num_heads=heads, qk_dim=score, value_dim=value, windows=op.windows, cache=held,
        )  # fmt: skip

    def _to_cache(self, query: Array, output: Array, across: tuple[str, ...]) -> Iterator[Op]:
        """Queries of single tokens sent to where the cache lies, and results sent back.

        across: the axes of heads that do not split the cache's. Over parts of a sequence attention is merged: each
        head's maximum, then its weighted results and their sum (flash decoding, pytorch.org/blog/flash-decoding).
        """
        if self.split == "batch":
            for name, array in (("queries", query), ("heads", output)):
                batch = array.dims[0]._replace(axes=(*array.dims[0].axes, *self.fsdp))
                yield from self._move(name, "all-to-all", across, replace(array, dims=(batch, *array.dims[1:])))
            yield from self._move("heads", "all-gather", self.fsdp, output)
        elif self.split == "sequence":
            whole = replace(output, dims=tuple(_whole(dim, across) for dim in output.dims))
            scalars, parts = (_wide("sums", array.dims[:-1]) for array in (whole, output))
            gathered = replace(query, dims=tuple(_whole(dim, across) for dim in query.dims))
            yield from self._move("queries", "all-gather", across, gathered)
            yield from self._move("maxima", "all-reduce", (*self.fsdp, *across), scalars)
            yield from self._move("heads and sums", "reduce-scatter", across, whole, scalars)
            yield from self._move("heads and sums", "all-reduce", self.fsdp, output, parts)

    def _latents(self, op: Attention) -> tuple[Array, ...]:
        """The latent that keys and values are made of, and the part of a key beside it; nothing where they are kept."""
        source = self.linears[op.value]
        if source.inputs[0][0] == "embed":
            return ()
        rank = source.inputs[0][1]
        part = next(each for each in self.block.ops if isinstance(each, Slice) and each.target == source.source)
        tokens, rest = self.layout.tokens, self.linears[part.source].outputs[0][1] - rank
        return Array("latent", (*tokens, Dim("L", rank))), Array("key part", (*tokens, Dim("H", rest)))

    def _reads_of_stream(self) -> Iterator[str]:
        """The values before attention that are products with the stream."""
        for op in self.block.ops:
            if isinstance(op, Attention):
                return
            if isinstance(op, Linear) and op.inputs[0][0] == "embed":
                yield op.target

    def _pass(self, kind: Pass, *arrays: Array) -> Elementwise:
        """A chain of elementwise ops."""
        return Elementwise(kind=kind, phase="forward", region=self.region, block=self.part, arrays=arrays)

    def _move(self, name: str, kind: Kind, axes: tuple[str, ...], *arrays: Array) -> Iterator[Communicate]:
        """A collective of this block."""
        yield from _moved(name, kind, axes, self.region, *arrays)


def _embedding(ops: Iterable[EndOp], layout: Layout) -> Iterator[Op]:
    """The lookup in a table whose rows are split."""
    for op in ops:
        if isinstance(op, Lookup) and not op.is_positional:
            stream = Array("embedding", (*layout.tokens, *layout.stored((op.columns,))))
            kind: Kind = "reduce-scatter" if layout.tp_stream == "split" else "all-reduce"
            yield from _moved("embedding", kind, layout.axes("vocab"), EMBEDDING, stream)


def _logits(ops: Iterable[EndOp], layout: Layout) -> Iterator[Op]:
    """The logits of each sequence's last token, and the best of each part of them."""
    batch, vocab = layout.tokens[0], layout.axes("vocab")
    for op in ops:
        if isinstance(op, Linear):
            inner, columns = layout.stored(op.inputs), layout.stored(op.outputs)
            if layout.tp_stream == "split":
                yield from _moved("logits input", "all-gather", vocab, LOGITS, Array("stream", (batch, *inner)))
            yield Matmul(
                name=op.name, target=op.target, phase="forward", region=LOGITS, block=Block.LOGITS, role="result",
                rows=(batch,), inner=inner, columns=columns,
            )  # fmt: skip
            yield from _moved("logits", "all-reduce", layout.axes("embed"), LOGITS, _wide("logits", (batch, *columns)))
            # A value and its id.
            best = _wide("best tokens", (batch, Dim("best", 2), Dim("P", None)))
            yield from _moved("best tokens", "all-gather", vocab, LOGITS, best)


def _logit_arrays(ops: Iterable[EndOp], layout: Layout) -> Iterator[Array]:
    """The logits of the last tokens."""
    for op in ops:
        if isinstance(op, Linear):
            yield _wide("logits", (layout.tokens[0], *layout.stored(op.outputs)))


def _moved(name: str, kind: Kind, axes: tuple[str, ...], region: Region, *arrays: Array) -> Iterator[Communicate]:
    """A collective over its live axes, if any."""
    if axes:
        yield Communicate(
            name=name, kind=kind, axes=axes, phase="forward", region=region, array=arrays[0], beside=arrays[1:]
        )


def _wide(name: str, dims: tuple[Dim, ...]) -> Array:
    """An array of four bytes an element."""
    return Array(name, dims, width="float32")


def _whole(dim: Dim, axes: tuple[str, ...]) -> Dim:
    """A dim that some axes do not split."""
    return dim._replace(axes=tuple(axis for axis in dim.axes if axis not in axes))
