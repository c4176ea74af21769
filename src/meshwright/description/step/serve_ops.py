"""Ops of a server's step on weight-stationary layouts in one and two dims (arXiv:2211.05102).

The residual stream is split over fsdp. The first matmuls of a block leave partial sums over fsdp, the last one over sp
and tp; with fsdp=1 this is Megatron's one-dim layout. In prefill the stream is also split over sp and tp, along tokens.
If the cache is split by batch or sequence, queries are sent to it and attention's output is sent back
(arXiv:2211.05102, section 3.3; scaling book, jax-ml.github.io/scaling-book/inference). Ops declare layouts before and
after; the notation gives the collectives between them (`notation.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from meshwright.description.step.blocks import program
from meshwright.description.step.ir import (
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
    axes_of,
)
from meshwright.description.step.layer import (
    STREAM,
    Add,
    Attention,
    Combine,
    Dispatch,
    Gated,
    GatedDelta,
    Linear,
    Mix,
    Norm,
    Rotary,
    SigmoidGate,
    Slice,
)
from meshwright.description.step.layer import Block as LayerBlock
from meshwright.description.step.layer_inputs import ALTUP_ACTIVE, LAYER_INPUT, STREAMS
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import LORA_A, LORA_B
from meshwright.description.step.passes.nodes import Layout, from_outside, outermost_first
from meshwright.description.step.passes.serve_ends import (
    EMBEDDING,
    LOGITS,
    embedding_ops,
    gathered,
    layer_input_ops,
    logits_ops,
    moved,
    norm_sums,
    reduced,
    split_dim,
    stream_ops,
    whole_dim,
)
from meshwright.description.step.passes.shard_delta import delta_matmuls
from meshwright.description.step.serving import GATHERED_RULES, SERVING_RULES, TENSOR_AXES, CacheSplit


@lru_cache(maxsize=1 << 10)
def serving_ops(
    model: ModelConfig, is_paged: bool, split: CacheSplit, live: frozenset[str]
) -> tuple[Ops, Mapping[str, tuple[Array, ...]]]:
    """Return the ops of a step, and the arrays that a device holds at the same time, by moment.

    Args:
        model: the model.
        is_paged: as in `Serving.is_paged`; if False, the residual stream is split along the tokens of whole prompts.
        split: how the cache is split.
        live: the mesh axes larger than 1. Nothing depends on their degrees.
    """
    found = program(model)

    def on(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in live)

    # Prompts that are split by batch: matmuls read weights that are gathered (`ServingLayout.gathers_weights`).
    rules = GATHERED_RULES if split == "batch" and not is_paged else SERVING_RULES
    layout = Layout(
        rules=rules, live=live, batch=on(rules["batch"]), sequence=(), residual=() if is_paged else on(TENSOR_AXES),
        sp_method="gather", is_packed=False, is_pair=False, is_zigzag=False, collective_matmul=False,
        tp_stream="whole" if is_paged else "split", dropout=False,
    )  # fmt: skip
    stored = replace(layout, rules=SERVING_RULES, batch=on(SERVING_RULES["batch"]))
    ops: list[Op] = [
        *embedding_ops(found.embedding, layout, stored),
        *layer_input_ops(found.layer_inputs, layout, stored),
        *stream_ops(found.widening, layout, stored),
    ]
    # The inputs of all layers are there until the last.
    inputs = tuple(
        Array(op.target, (*layout.residual_tokens, *layout.stored(op.outputs)))
        for op in found.layer_inputs
        if isinstance(op, Linear)
    )
    arrays: dict[str, tuple[Array, ...]] = {}
    for stack in found.stacks:
        region = Region(stack.name)
        whole = set[str]()
        walks = [_BlockWalk(block, region, stack.num_layers, layout, stored, split, whole) for block in stack.blocks]
        for walk in walks:
            ops += walk.ops()
        stream, residual = (Array(STREAM, (*rows, walks[0].width)) for rows in (layout.tokens, layout.residual_tokens))
        # A lookup's rows before and after those of others are masked; a block's input, its stream, and what it makes.
        arrays[EMBEDDING.name] = (stream, stream, *inputs)
        moments = enumerate(held for walk in walks for held in walk.live)
        streams = [walk.arrays[STREAMS] for walk in walks[:1] if STREAMS in walk.arrays]
        arrays |= {f"{stack.name} {number}": (stream, residual, *streams, *inputs, *held) for number, held in moments}
    ops += stream_ops(found.narrowing, layout, stored)
    ops += logits_ops(found.logits, layout, stored)
    arrays[LOGITS.name] = tuple(
        Array("logits", (stored.tokens[0], *stored.stored(op.outputs)), width="float32")
        for op in found.logits
        if isinstance(op, Linear)
    )
    return Ops(tuple(ops)), arrays


class _BlockWalk:
    """Builder of the ops of one block, which tracks the layout of each value op by op."""

    def __init__(
        self,
        block: LayerBlock,
        region: Region,
        num_layers: int,
        layout: Layout,
        stored: Layout,
        split: CacheSplit,
        whole: set[str],
    ) -> None:
        self.block, self.region, self.num_layers = block, region, num_layers
        self.layout, self.stored, self.split = layout, stored, split
        self.whole = whole  # The names of weights that the layer has gathered.
        self.part = Block.MLP if block.name in ("mlp", LAYER_INPUT) else Block.ATTENTION
        self.fsdp, self.tensor = layout.axes("embed"), layout.axes("mlp")
        self.is_prefill = layout.tp_stream == "split"
        first = next(op for op in block.ops if isinstance(op, Norm | Linear))
        self.width = Dim("D", first.size if isinstance(first, Norm) else first.fan_in, self.fsdp)
        self.linears = {op.target: op for op in block.ops if isinstance(op, Linear)}
        self.arrays: dict[str, Array] = from_outside(block.ops, layout)
        if STREAMS in self.arrays:
            self.arrays[STREAMS] = split_dim(self.arrays[STREAMS], -1, self.fsdp)
        self.live: list[tuple[Array, ...]] = []  # Of each op between matmuls: attention, the MLP's activation.

    def ops(self) -> Iterator[Op]:
        """Yield the ops in order. Norms of heads and of the block's output are counted in adjacent elementwise ops."""
        residual, stream = (Array(STREAM, (*t, self.width)) for t in (self.layout.residual_tokens, self.layout.tokens))
        yield self._pass("norm", residual)  # One, read by several ops; it stands for a norm only after the block too.
        for op in self.block.ops:
            if isinstance(op, Norm) and op.source == STREAM:
                yield from self._norm_sums(op)
        # One all-gather over tokens for each different input of the block's matmuls. Experts gather their input too,
        # unless tokens are sent to the experts' devices.
        products = {
            op.source
            for op in self.linears.values()
            if op.inputs[0][0] == "embed" and not op.is_on_residual and not op.num_experts
        }
        has_experts = any(isinstance(op, Dispatch) for op in self.block.ops)
        for _ in range(len(products) + (has_experts and not self.layout.axes("expert"))):
            yield from self._move(f"{self.block.name} input", (residual, stream))
        # Values with the dims of the stream that norms read before they are added to it.
        streams = {name for name, op in self.linears.items() if op.outputs[0][0] == "embed"}
        streams |= {op.target for op in self.block.ops if isinstance(op, Combine | Add)} - {STREAM}
        for op in self.block.ops:
            match op:
                case Linear():
                    yield from self._linear(op)
                case Norm() if op.source in streams:
                    yield from self._norm_sums(op)
                case Norm() if op.dims:
                    rows = self._summed_over_fsdp(Array("squares", self.layout.tokens)).dims
                    of_heads = Array("squares", rows, self.tensor, width="float32")
                    yield from self._move(f"{op.name} squares", (of_heads, reduced(of_heads)))
                case SigmoidGate() if self.part is Block.ATTENTION:
                    yield from self._reduced_inputs("attention gate", op.by)
                case SigmoidGate() | Norm() if op.source in self.arrays:
                    self.arrays[op.target] = self.arrays[op.source]
                case Attention():
                    yield from self._attention(op)
                case GatedDelta():
                    yield from self._gated_delta(op)
                case Gated() if op.is_on_residual:
                    self.arrays[op.target] = self.arrays[LAYER_INPUT]
                case Gated() if not self.linears.keys() >= {*op.sources}:  # The output gate of linear attention.
                    yield from self._reduced_inputs("attention gate", op.sources[0])
                    self.arrays[op.target] = reduced(self.arrays[op.sources[0]])
                case Gated():
                    yield from self._gated(op)
                case Dispatch() | Combine() if self.layout.axes("expert"):
                    yield from self._exchange(op)
                case Dispatch():
                    yield from self._choices(op)
                case Mix():
                    yield self._pass("residual", self.arrays[STREAMS])
                    self.arrays[ALTUP_ACTIVE] = residual
                case Add() if op.target != STREAM:
                    yield self._pass("residual", residual)
                case Add():
                    # In decode the sum is one all-reduce, in prefill it is scattered along the tokens.
                    is_summed = self.block.name != LAYER_INPUT
                    for _ in range(2 if self._sums_experts_apart(op) else int(is_summed)):
                        yield from self._move(
                            f"{self.block.name} output", (replace(stream, unreduced=self.tensor), residual)
                        )
                    for _ in range(self.block.num_additions):
                        yield self._pass("residual", residual)
                case _:
                    pass
        if hidden := [self.arrays[op.target] for op in self.block.ops if isinstance(op, Gated)]:
            sources = max(len(op.sources) for op in self.block.ops if isinstance(op, Gated))
            yield self._pass("gated" if sources > 1 else "activation", *hidden)

    def _sums_experts_apart(self, op: Add) -> bool:
        """Whether an op adds the experts' output and a shared MLP's, each of which is summed over devices before.

        In decode their partial sums are added first, but not to those of a shared MLP with a gate.
        """
        routed = {each.target for each in self.block.ops if isinstance(each, Combine)}
        if len(op.sources) == 1 or not routed & {*op.sources} or self.layout.axes("expert"):
            return False
        return self.is_prefill or not {*op.sources} <= routed | self.linears.keys()

    def _norm_sums(self, op: Norm) -> Iterator[Op]:
        """Yield the all-reduces of a norm whose dim is split."""
        yield from norm_sums(op, f"{self.block.name} norm", self.region, self.layout.residual_tokens, self.fsdp)

    def _linear(self, op: Linear) -> Iterator[Op]:
        """Yield the ops of a matmul with a weight; no weight is gathered."""
        inner, columns = self.layout.stored(op.inputs), self.layout.stored(op.outputs)
        tokens = self.layout.residual_tokens if op.is_on_residual else self.layout.tokens
        experts = (Dim("A", None),) if op.num_experts else ()
        rows = (Dim("R", None),) if op.num_experts else tokens
        if not op.num_experts and op.name not in self.whole:
            self.whole.add(op.name)
            stored, used = (
                Array(op.name, (*of.stored(op.inputs), *of.stored(op.outputs))) for of in (self.stored, self.layout)
            )
            yield from moved(op.name, self.region, (stored, used), of_weight=True)
        yield Matmul(
            name=f"{self.region.name}.{op.name}", target=op.target, phase="forward", region=self.region,
            block=self.part, role="result", rows=rows, inner=inner, columns=columns, experts=experts,
        )  # fmt: skip
        self.arrays[op.target] = result = Array(op.target, (*tokens, *columns), axes_of(inner))
        if op.low_rank:
            # The branches of all slots are partial sums like the matmul's, and are added before these are summed.
            low = self.layout.stored(op.low_rank.dims)
            for name, read, made in ((LORA_A, inner, low), (LORA_B, low, columns)):
                yield Matmul(
                    name=f"{self.region.name}.{op.name}{name}", target=op.target, phase="forward", region=self.region,
                    block=self.part, role="result", rows=rows, inner=read, columns=made,
                )  # fmt: skip
            yield self._pass("low_rank", result)
        if op.is_on_residual:
            is_router = op.outputs[0][0] == "router"
            before = replace(result, width="float32") if is_router else result
            yield from self._move("router" if is_router else op.name, (before, reduced(before)))

    def _gated(self, op: Gated) -> Iterator[Op]:
        """Yield the collectives over fsdp of an MLP's hidden activations.

        The partial sums of the first matmuls are reduce-scattered, and the result of the activation is gathered.
        """
        copies = next((each.num_active for each in self.block.ops if isinstance(each, Dispatch)), 1)
        is_of_experts = self.linears[op.sources[0]].num_experts > 0
        sources = [self.arrays[name] for name in op.sources]
        if is_of_experts:
            # The dim K, before the last one, is for the experts of a token.
            sources = [replace(array, dims=(*array.dims[:-1], Dim("K", copies), array.dims[-1])) for array in sources]
        self.live.append(tuple(sources))
        self.arrays[op.target] = hidden = reduced(sources[0])
        scattered = [split_dim(array, -1, self.fsdp) for array in sources]
        yield from self._move("mlp hidden", *zip(sources, scattered, strict=True))
        if op.sparsity:
            sums = Array("cutoff", scattered[0].dims[:2], outermost_first(scattered[0].dims[-1].axes), width="float32")
            for _ in range(2):  # Mean and variance.
                yield from self._move("cutoff", (sums, reduced(sums)))
        yield from self._move("mlp hidden", (scattered[0], hidden))

    def _exchange(self, op: Dispatch | Combine) -> Iterator[Op]:
        """Yield the sends of tokens to the devices of their experts, or back, with one copy per device.

        Each device of sp and tp sends its part of a token. The parts are all-gathered on arrival, and reduce-scattered
        before they are sent back.
        """
        batch, tokens, expert = *self.layout.tokens, self.layout.axes("expert")
        here = Array("sent", (batch, tokens._replace(axes=self.tensor), Dim("C", None), self.width))
        there = Array("sent", (whole_dim(batch, expert), tokens, Dim("C", None, expert), self.width))
        if isinstance(op, Dispatch):
            yield from self._move("experts dispatch", (here, there))
        else:
            yield from self._move("experts combine", (replace(there, unreduced=self.tensor), here))

    def _choices(self, op: Dispatch) -> Iterator[Op]:
        """Yield the gathers of each token's experts and routing weights over sp and tp, which split experts' widths."""
        here, there = (
            Array("choices", (*tokens, Dim("K", op.num_active)), width="float32")
            for tokens in (self.layout.residual_tokens, self.layout.tokens)
        )
        yield from self._move("choices", (here, there), (here, there))

    def _attention(self, op: Attention) -> Iterator[Op]:
        """Yield attention, and the collectives that bring queries, keys and values to the cache and the output back."""
        query = self.arrays[op.query]
        output = Array(op.target, (*query.dims[:-1], Dim("H", op.value_dim)))
        rotates = any(isinstance(each, Rotary) for each in self.block.ops)
        # In prefill the TPU compiler writes float32 queries and their rotated halves, padded to 128 lanes.
        self.live.append((replace(query, width="float32"),) * 3 if rotates and self.is_prefill else (query, output))
        latents = self._latents(op)
        cached = latents or (self.arrays[op.key], self.arrays[op.value])
        if rotates and not op.is_sharing:
            # Approximate: counted as if sp split the rotation of keys; in fact each device of sp rotates all keys.
            keys = Array(op.key, (*self.layout.tokens, Dim("N", op.num_kv_heads, self.tensor), Dim("H", op.qk_dim)))
            yield self._pass("rotary", query, keys)
        if latents:
            sums = [self.arrays[each] for each in self._reads_of_stream()]
            yield from self._move("latents", *((each, reduced(each)) for each in sums))
        else:
            names, values = "queries, keys and values", (query,) if op.is_sharing else (query, *cached)
            yield from self._move(names, *((each, self._summed_over_fsdp(each)) for each in values))
        held = tuple(
            Array(array.name, (Dim("Q", None), Dim("T", None), *array.dims[len(self.layout.tokens) :]))
            for array in cached
        )
        # kv heads and the query heads that share each are one dim.
        heads = Dim("N", op.num_heads, axes_of(query.dims[2:]))
        score, value = op.qk_dim, op.value_dim
        if self.is_prefill:
            batch, tokens = self.layout.tokens
            if not latents:
                # Each device of fsdp attends with a part of the queries to all keys and values before them.
                whole = () if op.is_sharing else cached
                yield from self._move(
                    "keys and values", *((self._summed_over_fsdp(each), reduced(each)) for each in whole)
                )
                yield from self._move("heads", (self._summed_over_fsdp(output), output))
                tokens = tokens._replace(axes=self.fsdp)
            queries = replace(query, dims=(batch, tokens, heads, Dim("H", score)))
        else:
            if latents:
                # Weights of separate matmuls map queries to the latent and results from it (DeepSeek-V2,
                # arXiv:2405.04434, section 2.1.2), so that only the latent is read.
                score, value = sum(array.dims[-1].size or 0 for array in latents), latents[0].dims[-1].size or 0
                query, output = (
                    replace(array, dims=(*self.layout.tokens, heads, Dim("H", size)))
                    for array, size in ((query, score), (output, value))
                )
            across = tuple(axis for axis in self.tensor if axis not in {a for each in held for a in each.split_axes})
            yield from self._to_cache(query, output, across)
            if self.split != "heads":
                heads = whole_dim(heads, across)
                if op.has_sinks:
                    # Those of all layers at once.
                    dims = Dim("layers", self.num_layers), *self.arrays[op.query].dims[2:-1]
                    sinks = Array("sinks", dims, width="float32")
                    yield from moved(sinks.name, EMBEDDING, (sinks, gathered(sinks, across)))
            queries = Array(op.query, (Dim("Q", None), self.layout.tokens[1], heads, Dim("H", score)))
        yield AttentionOp(
            name=op.target, phase="forward", region=self.region, query=queries, key=held[0], value=held[-1],
            output=output, num_heads=heads, qk_dim=score, value_dim=value, windows=op.windows,
            is_chunked=op.is_chunked, cache=held, is_sharing=op.is_sharing,
        )  # fmt: skip

    def _reduced_inputs(self, name: str, *values: str) -> Iterator[Op]:
        """Yield the all-reduce over fsdp of matmul results, which each device needs for all tokens of its heads."""
        yield from self._move(name, *((self.arrays[each], reduced(self.arrays[each])) for each in values))

    def _gated_delta(self, op: GatedDelta) -> Iterator[Op]:
        """Yield the ops of linear attention. Each device has the states of its heads for all sequences of its group."""
        yield from self._reduced_inputs("linear attention", op.query, op.key, op.value, op.rate, op.decay)
        batch, _, heads, group, _ = (values := reduced(self.arrays[op.value])).dims
        self.live.append(tuple(self.arrays[name] for name in (op.query, op.key, op.value)))
        memory = (batch, heads, group, Dim("H", op.key_dim), Dim("V", op.value_dim))
        tails = (
            Array(name, (batch, Dim("T", op.taps - 1), *self.arrays[value].dims[2:])) for name, value, _ in op.convolved
        )
        yield self._pass("state", Array("states", memory, width="float32"), *tails)
        yield self._pass("convolution", *(self.arrays[value] for _, value, _ in op.convolved))
        if self.is_prefill:
            yield self._pass("delta", values)
            for work in delta_matmuls(op, f"{self.region.name}.{op.target}", values):
                if work.passes == "backward":
                    continue
                yield Matmul(
                    name=work.name, target=op.target, phase="forward", region=self.region, block=self.part,
                    role="result", rows=work.rows, inner=work.inner, columns=work.columns, source=work.source,
                    right=work.right,
                )  # fmt: skip

    def _to_cache(self, query: Array, output: Array, across: tuple[str, ...]) -> Iterator[Op]:
        """Yield the collectives that bring queries to the devices with the cache, and attention's output back.

        If a sequence's cache is split over devices, their results are merged: first the maxima of each head's scores,
        then the weighted values and the sums of the weights (flash decoding, pytorch.org/blog/flash-decoding).

        Args:
            query: the queries.
            output: attention's output.
            across: axes that split the heads of queries but not those of the cache.
        """
        if self.split == "batch":
            sent = self._summed_over_fsdp(query)
            yield from self._move("queries", (sent, split_dim(gathered(sent, across), 0, across)))
            yield from self._move(
                "heads", (split_dim(gathered(self._summed_over_fsdp(output), across), 0, across), output)
            )
        elif self.split == "sequence":
            axes = (*self.fsdp, *across)
            whole = replace(gathered(output, across), unreduced=axes)
            scalars, parts = (
                Array("sums", array.dims[:-1], array.unreduced, width="float32") for array in (whole, output)
            )
            yield from self._move("queries", (reduced(query), gathered(query, across)))
            yield from self._move("maxima", (scalars, reduced(scalars)))
            yield from self._move("heads and sums", (whole, output), (scalars, parts))

    def _summed_over_fsdp(self, array: Array) -> Array:
        """Return an array of queries, keys, values or heads after its partial sums over fsdp are added.

        The sums are reduce-scattered along tokens in prefill, along sequences if the cache is split by batch, and
        otherwise all-reduced.
        """
        if self.is_prefill or self.split == "batch":
            return split_dim(array, 1 if self.is_prefill else 0, self.fsdp)
        return reduced(array)

    def _latents(self, op: Attention) -> tuple[Array, ...]:
        """Return the latent and the shared part of keys, if a server caches them (`LatentKeys`); else ()."""
        if op.latent is None:
            return ()
        tokens = self.layout.tokens
        sizes = {each.target: each.size for each in self.block.ops if isinstance(each, Slice)}
        rank, rest = sizes[op.latent.latent], sizes[op.latent.rotary]
        return Array("latent", (*tokens, Dim("L", rank))), Array("key part", (*tokens, Dim("H", rest)))

    def _reads_of_stream(self) -> Iterator[str]:
        """Yield the names of the values that matmuls before attention compute from the residual stream."""
        for op in self.block.ops:
            if isinstance(op, Attention):
                return
            if isinstance(op, Linear) and op.inputs[0][0] == "embed":
                yield op.target

    def _pass(self, kind: Pass, *arrays: Array) -> Elementwise:
        """Return an elementwise op of this block."""
        return Elementwise(kind=kind, phase="forward", region=self.region, block=self.part, arrays=arrays)

    def _move(self, name: str, *pairs: tuple[Array, Array]) -> Iterator[Communicate]:
        """Yield the collectives that reshard arrays of this block alike. pairs: (before, after) of each."""
        yield from moved(name, self.region, *pairs)
