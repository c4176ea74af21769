"""Build a decoder's ops (`step.layer`) from the features of a `ModelConfig`.

Weights of matmuls that add to the residual stream are initialised smaller by sqrt(2 layers), as in GPT-2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.layer import (
    HEADS,
    LINEAR_HEADS,
    STREAM,
    Add,
    Attention,
    Block,
    Combine,
    Concat,
    CrossEntropy,
    Dims,
    Dispatch,
    EndOp,
    Gated,
    GatedDelta,
    LatentKeys,
    LayerOp,
    Linear,
    Lookup,
    Norm,
    Program,
    Rotary,
    SigmoidGate,
    Slice,
    Stack,
    of_layers,
    shortest_cycle,
)
from meshwright.description.step.lora import with_lora
from meshwright.description.step.model import (
    Experts,
    LearnedPositions,
    Model,
    ModelConfig,
    ProgramModel,
    RotaryPositions,
)


@cache
def program(model: Model) -> Program:
    """Return a model's forward pass as ops."""
    if isinstance(model, ProgramModel):
        return model.program
    stacks = model.family.layers(model) or decoder_layers(model)
    found = Program(embedding=embedding_ops(model), stacks=stacks, logits=logits_ops(model))
    return with_lora(found, model.lora) if model.lora else found


def layers(model: Model) -> tuple[Stack, ...]:
    """Return a model's stacks of layers, one for each kind of layer."""
    return program(model).stacks


def decoder_layers(model: ModelConfig) -> tuple[Stack, ...]:
    """Return a decoder's stacks: that of the dense layers before MoE layers, if any, then those of all other layers.

    If the other layers are of several kinds, the stacks alternate (`Stack.is_alternating`).
    """
    num_dense = model.experts.num_dense_layers if model.experts else 0
    last = _stacks(model, "layers", range(num_dense, model.num_layers))
    return (*_stacks(model, "dense_layers", range(num_dense)), *last) if num_dense else last


def embedding_ops(model: ModelConfig) -> tuple[EndOp, ...]:
    """Return the ops before the first layer: embedding of tokens and, if learned, of positions."""
    table = Lookup(
        name="embedding",
        rows=("vocab", model.vocab),
        columns=("embed", model.embed),
        # A tied table is initialised like an unembedding; the first norm undoes the scale.
        init_scale=1 / math.sqrt(model.embed) if model.tied_embeddings else 1.0,
        multiplier=model.scales.embedding,
        is_tied=model.tied_embeddings,
    )
    ops: list[EndOp] = [table]
    if isinstance(model.positions, LearnedPositions):
        rows = ("positions", model.positions.rows)
        ops.append(Lookup(name="positions", rows=rows, columns=("embed", model.embed), is_positional=True))
    if model.norms.after_embedding:
        ops.append(_norm(model, "embedding_norm", STREAM, STREAM))
    return tuple(ops)


def logits_ops(model: ModelConfig) -> tuple[EndOp, ...]:
    """Return the ops after the last layer: the final norm, the logits and the loss."""
    unembedding = Linear(
        name="embedding" if model.tied_embeddings else "unembedding",
        source="final",
        target="logits",
        inputs=(("embed", model.embed),),
        outputs=(("vocab", model.vocab),),
        has_bias=model.biases.unembedding,
        is_rounded=False,
        is_tied=model.tied_embeddings,
    )
    return (
        _norm(model, "final_norm", STREAM, "final"),
        unembedding,
        CrossEntropy(source="logits", softcap=model.scales.logits_softcap, scale=model.scales.logits),
    )


def moe_block(model: ModelConfig, experts: Experts) -> Block:
    """Return a MoE block: its norm, the experts, and the shared MLP if there is one."""
    normed, shared, are_beside = "mlp_normed", experts.shared_mlp, experts.are_beside_mlp
    routed, read = ("router_normed", "experts_normed") if are_beside else (normed, normed)

    def on_residual(name: str, target: str, size: int, *, has_bias: bool = False) -> Linear:
        return Linear(
            name=name,
            source=routed,
            target=target,
            inputs=(("embed", model.embed),),
            outputs=(("router", size),),
            has_bias=has_bias,
            is_rounded=False,
            is_on_residual=True,
        )

    dispatch = Dispatch(
        source=read,
        router="router_logits",
        target="expert_rows",
        num_experts=experts.count,
        num_active=experts.num_active,
        capacity_factor=experts.capacity_factor,
        routing=experts.routing,
        num_padding=experts.padding,
    )
    by_experts: tuple[LayerOp, ...] = (
        on_residual("router", "router_logits", experts.count, has_bias=experts.has_bias),
        dispatch,
        *_mlp(model, "expert_", "expert_rows", experts.mlp, num_experts=experts.num_stored),
        Combine(source="expert_down", target="expert_added"),
    )
    if are_beside:
        router_norm = replace(_norm(model, "router_norm", STREAM, routed), factor=1 / math.sqrt(model.embed))
        return Block(name="mlp", ops=(*_mlp_and(model, (router_norm, *by_experts)), _last_add(model, "mlp_added")))
    ops: tuple[LayerOp, ...] = (_norm(model, "mlp_norm", STREAM, normed), *by_experts)
    added = ("expert_added",)
    if shared:
        ops, added = (*ops, *_mlp(model, "shared_", normed, shared)), (*added, "shared_down")
    if experts.has_shared_gate:
        gate = SigmoidGate(source="shared_down", by="shared_logit", target="shared_added")
        ops, added = (
            (*ops, on_residual("shared_expert_gate", "shared_logit", 1), gate),
            ("expert_added", "shared_added"),
        )
    return Block(name="mlp", ops=(*ops, _last_add(model, *added)))


def _mlp_and(model: ModelConfig, by_experts: tuple[LayerOp, ...]) -> tuple[LayerOp, ...]:
    """Return the ops of an MLP and of the experts beside it (`by_experts`), whose outputs are normed and summed."""
    return (
        _norm(model, "mlp_norm", STREAM, "mlp_normed"),
        *_mlp(model, "", "mlp_normed", model.mlp),
        _norm(model, "mlp_output_norm", "down", "mlp_output"),
        _norm(model, "experts_norm", STREAM, "experts_normed"),
        *by_experts,
        _norm(model, "experts_output_norm", "expert_added", "experts_output"),
        Add(sources=("mlp_output", "experts_output"), target="both"),
        _norm(model, "mlp_post_norm", "both", "mlp_added"),
    )


def _stacks(model: ModelConfig, name: str, layers: range) -> tuple[Stack, ...]:
    """Return the stack `name` of some layers; if they are of several kinds, a stack for each position in their cycle.

    The stacks of a cycle are named `{name}_0`, `{name}_1` and so on.
    """
    linear, experts, full = model.attention.linear, model.experts, model.attention.full_heads
    are_linear = of_layers(linear.layers if linear else (False,), layers)
    have_experts = (experts is not None and experts.are_in(layer) for layer in layers)
    are_full = (full is not None and window is None for window in of_layers(model.attention.windows, layers))
    every = tuple(zip(are_linear, have_experts, are_full, strict=True))
    kinds = shortest_cycle(every)
    if len(layers) % len(kinds):
        kinds = every  # One cycle of all layers.
    stacks: list[Stack] = []
    for place, (is_linear, has_experts, is_full) in enumerate(kinds):
        own = layers[place :: len(kinds)]
        of_kind = model.with_full_heads if is_full else model
        are_values_keys = is_full and full is not None and full.are_values_keys
        blocks = _blocks(
            of_kind, own, experts if has_experts else None, is_linear=is_linear, are_values_keys=are_values_keys
        )
        label = name if len(kinds) == 1 else f"{name}_{place}"
        stacks.append(Stack(name=label, num_layers=len(own), blocks=blocks, is_alternating=place > 0))
    return tuple(stacks)


def _blocks(
    model: ModelConfig, layers: range, experts: Experts | None, *, is_linear: bool, are_values_keys: bool
) -> tuple[Block, ...]:
    """Return the blocks of layers of one kind: attention and MLP (or experts), or one block with both in parallel."""
    attention = _linear_attention_ops(model) if is_linear else _attention_ops(model, layers, are_values_keys)
    if model.parallel_blocks:
        both = Block(name="block", ops=(*attention, *_mlp_ops(model), _add(model, "attention_added", "mlp_added")))
        return (both,)
    dense = Block(name="mlp", ops=(*_mlp_ops(model), _last_add(model, "mlp_added")))
    mlp = moe_block(model, experts) if experts else dense
    return Block(name="attention", ops=(*attention, _add(model, "attention_added"))), mlp


def _linear_attention_ops(model: ModelConfig) -> tuple[LayerOp, ...]:
    """Return the ops of linear attention from its norm to `attention_added`, which is added to the residual stream."""
    linear = model.attention.linear
    assert linear is not None
    heads, group = (LINEAR_HEADS, linear.num_heads), ("group", linear.num_value_heads // linear.num_heads)
    keys: Dims = (heads, ("head_dim", linear.key_dim))
    values: Dims = (heads, group, ("head_dim", linear.value_dim))
    outputs: dict[str, Dims] = {"query": keys, "key": keys, "value": values, "gate": values}
    outputs |= {"rate": (heads, group), "decay": (heads, group)}
    projections = [
        Linear(
            name=f"linear_{name}",
            source="attention_normed",
            target=f"linear_{name}",
            inputs=(("embed", model.embed),),
            outputs=dims,
        )
        for name, dims in outputs.items()
    ]
    delta = GatedDelta(
        query="linear_query",
        key="linear_key",
        value="linear_value",
        decay="linear_decay",
        rate="linear_rate",
        target="linear_heads",
        num_heads=linear.num_heads,
        group=group[1],
        key_dim=linear.key_dim,
        value_dim=linear.value_dim,
        taps=linear.taps,
    )
    # Checkpoints store this norm's scale itself, even if they store other norms' scales minus 1.
    head_norm = replace(_norm(model, "linear_norm", "linear_heads", "linear_normed", values[-1:]), offset=0.0)
    output = Linear(
        name="linear_output",
        source="linear_gated",
        target="attention_added",
        inputs=values,
        outputs=(("embed", model.embed),),
        init_scale=_adding_scale(model, linear.num_value_heads * linear.value_dim),
    )
    gated = Gated(sources=("linear_gate", "linear_normed"), target="linear_gated")
    return _norm(model, "attention_norm", STREAM, "attention_normed"), *projections, delta, head_norm, gated, output


def _attention_ops(model: ModelConfig, layers: range, are_values_keys: bool) -> tuple[LayerOp, ...]:
    """Return the ops of attention from its norm to `attention_added`, which is added to the residual stream."""
    has_norm, has_post_norm = model.norms.is_before, model.norms.is_after
    norms = (_norm(model, "attention_norm", STREAM, "attention_normed"),) if has_norm else ()
    stream, of_latent = "attention_normed" if has_norm else STREAM, model.attention.latent
    rotary = _rotary(model, model.positions, layers) if isinstance(model.positions, RotaryPositions) else []
    heads = (
        _latent_heads(model, of_latent, stream, rotary) if of_latent else _heads(model, stream, rotary, are_values_keys)
    )
    latent = LatentKeys(latent="latent", rotary="key_rope", key_weight="key", value_weight="value")
    attention = Attention(
        query="query",
        key="key",
        value="value",
        target="attention_heads",
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        qk_dim=model.query_key_dim,
        value_dim=model.value_dim,
        windows=shortest_cycle(of_layers(model.attention.windows, layers)),
        is_chunked=model.attention.is_chunked,
        softcap=model.scales.attention_softcap,
        scale=model.scales.attention,
        has_alibi=model.positions == "alibi",
        has_sinks=model.attention.has_sinks,
        latent=latent if of_latent else None,
    )
    gates: tuple[LayerOp, ...] = ()
    if model.attention.has_output_gate:
        gates = (SigmoidGate(source="attention_heads", by="query_gate", target="attention_gated"),)
    output = Linear(
        name="output",
        source="attention_gated" if gates else "attention_heads",
        target="attention_output" if has_post_norm else "attention_added",
        inputs=_head_dims(model, model.value_dim),
        outputs=(("embed", model.embed),),
        init_scale=_adding_scale(model, model.num_heads * model.value_dim),
        has_bias=model.biases.output,
    )
    ops = (*norms, *heads, attention, *gates, output)
    if not has_post_norm:
        return ops
    return (*ops, _norm(model, "attention_post_norm", "attention_output", "attention_added"))


def _heads(model: ModelConfig, stream: str, rotary: list[Rotary], are_values_keys: bool) -> tuple[LayerOp, ...]:
    """Return the ops that compute queries, keys and values from the value named `stream`."""
    single: Dims = (("kv_heads", model.num_kv_heads), ("head_dim", model.head_dim))
    of_queries = _head_dims(model, model.head_dim)
    gate = {"query_gate": of_queries} if model.attention.has_output_gate else {}
    dims = {"query": of_queries, **gate, "key": single, "value": single}
    ops: list[LayerOp] = [
        Linear(
            name=name,
            source=stream,
            target=name,
            inputs=(("embed", model.embed),),
            outputs=outputs,
            has_bias=model.biases.qkv,
            is_fused=name in ("key", "value"),
        )
        for name, outputs in dims.items()
        if name != "value" or not are_values_keys
    ]
    if model.attention.has_value_norm:
        # Before the norm of keys, which may be the values too.
        source = "key" if are_values_keys else "value"
        norm = _norm(model, "value_norm", source, "value", single[-1:])
        ops.append(replace(norm, offset=0.0, has_scale=False))
    norms: list[LayerOp] = []
    if qk_norm := model.attention.qk_norm:
        norms = [
            _norm(model, f"{name}_norm", name, name, dims[name] if qk_norm == "all heads" else dims[name][-1:])
            for name in ("query", "key")
        ]
    if qk_norm == "rotated head, unscaled":
        rotates = tuple(not frequencies.is_identity for each in rotary[:1] for frequencies in each.by_layer) or (True,)
        norms = [replace(norm, offset=0.0, has_scale=False, by_layer=shortest_cycle(rotates)) for norm in norms]
    return *ops, *((*rotary, *norms) if qk_norm and "rotated" in qk_norm else (*norms, *rotary))


def _rotary(model: ModelConfig, positions: RotaryPositions, layers: range) -> list[Rotary]:
    """Return the rotary embedding of queries and keys: two ops if queries are also scaled by their position."""
    both = Rotary(
        values=("query", "key"),
        size=positions.dims or model.head_dim,
        by_layer=shortest_cycle(of_layers(positions.frequencies, layers)),
        is_interleaved=positions.is_interleaved,
    )
    if not any(frequencies.query_scaling for frequencies in both.by_layer):
        return [both]
    keys = tuple(frequencies.of_keys for frequencies in both.by_layer)
    return [replace(both, values=("query",)), replace(both, values=("key",), by_layer=keys)]


def _latent_heads(
    model: ModelConfig, latent: LatentAttention, stream: str, rotary: list[Rotary]
) -> tuple[LayerOp, ...]:
    """Return the ops of latent attention that compute queries, keys and values. Latents have no heads to split."""
    rank, rope = latent.kv_rank, latent.rope_head_dim
    embed: Dims = (("embed", model.embed),)

    def from_latent(name: str, source: str, target: str, inputs: Dims, size: int, *, is_fused: bool = False) -> Linear:
        outputs: Dims = (("kv_heads", model.num_heads), ("head_dim", size))
        return Linear(name=name, source=source, target=target, inputs=inputs, outputs=outputs, is_fused=is_fused)

    def to_latent(name: str, target: str, size: int) -> Linear:
        outputs: Dims = (("latent", size),)
        return Linear(name=name, source=stream, target=target, inputs=embed, outputs=outputs, has_bias=model.biases.qkv)

    def norm(name: str, size: int) -> Norm:
        return replace(_norm(model, f"{name}_norm", name, name, (("latent", size),)), epsilon=latent.norm_epsilon)

    ops: list[LayerOp] = [
        to_latent("latent", "latents", rank + rope),
        Slice(source="latents", target="latent", start=0, size=rank),
        Slice(source="latents", target="key_rope", start=rank, size=rope),
        norm("latent", rank),
    ]
    if latent.query_rank:
        inputs: Dims = (("latent_input", latent.query_rank),)
        ops += [
            to_latent("query_latent", "query_latent", latent.query_rank),
            norm("query_latent", latent.query_rank),
            from_latent("latent_query", "query_latent", "query", inputs, model.query_key_dim),
        ]
    else:
        ops.append(from_latent("query", stream, "query", embed, model.query_key_dim))
    narrow: Dims = (("latent_input", rank),)
    return (
        *ops,
        from_latent("key", "latent", "key_nope", narrow, latent.nope_head_dim, is_fused=True),
        from_latent("value", "latent", "value", narrow, latent.value_head_dim, is_fused=True),
        replace(rotary[0], values=("query",), size=rope, start=latent.nope_head_dim),
        replace(rotary[-1], values=("key_rope",), size=rope),
        Concat(sources=("key_nope", "key_rope"), target="key"),
    )


def _mlp_ops(model: ModelConfig) -> tuple[LayerOp, ...]:
    """Return the ops of the MLP from its norm to `mlp_added`, which is added to the residual stream."""
    norms, stream = (), STREAM
    if model.parallel_blocks == "shared norm":
        stream = "attention_normed"
    elif model.norms.is_before:
        norms, stream = (_norm(model, "mlp_norm", STREAM, "mlp_normed"),), "mlp_normed"
    if not model.norms.is_after:
        return *norms, *_mlp(model, "", stream, model.mlp, target="mlp_added")
    return (
        *norms,
        *_mlp(model, "", stream, model.mlp),
        _norm(model, "mlp_post_norm", "down", "mlp_added"),
    )


def _mlp(
    model: ModelConfig, prefix: str, source: str, width: int, *, target: str = "", num_experts: int = 0
) -> tuple[LayerOp, ...]:
    """Return the ops of an MLP: two matmuls, or three if it is gated, and the activation between them.

    prefix: the beginning of the names of its weights and values. source, target: the names of its input and its output.
    """
    names, experts = ("gate", "up") if model.gated else ("up",), model.experts
    has_bias = model.biases.mlp if not num_experts or experts is None else experts.has_bias
    opened = [
        Linear(
            name=f"{prefix}{name}",
            source=source,
            target=f"{prefix}{name}",
            inputs=(("embed", model.embed),),
            outputs=(("mlp", width),),
            num_experts=num_experts,
            has_bias=has_bias,
        )
        for name in names
    ]
    hidden = Gated(
        sources=tuple(op.target for op in opened),
        target=f"{prefix}hidden",
        function=model.activation,
        width=width,
    )
    down = Linear(
        name=f"{prefix}down",
        source=hidden.target,
        target=target or f"{prefix}down",
        inputs=(("mlp", width),),
        outputs=(("embed", model.embed),),
        num_experts=num_experts,
        init_scale=_adding_scale(model, width),
        has_bias=has_bias,
    )
    return *opened, hidden, down


def _norm(model: ModelConfig, name: str, source: str, target: str, dims: Dims = ()) -> Norm:
    """Return a norm with the model's settings over `dims`; over the residual stream if `dims` is empty."""
    return Norm(
        name=name,
        source=source,
        target=target,
        size=math.prod(size for _, size in dims) if dims else model.embed,
        dims=dims if len(dims) > 1 else (),
        kind=model.norms.kind,
        epsilon=model.norms.epsilon,
        offset=model.norms.offset,
        has_bias=model.norms.has_bias,
    )


def _add(model: ModelConfig, *sources: str) -> Add:
    """Return the op that adds the values named `sources` to the residual stream."""
    return Add(sources=sources, scale=model.scales.residual)


def _last_add(model: ModelConfig, *sources: str) -> Add:
    """Return the last op of a layer, which adds these values to the residual stream."""
    return replace(_add(model, *sources), has_layer_scale=model.scales.has_layer)


def _head_dims(model: ModelConfig, size: int) -> Dims:
    """Return the dims of query heads, each head of `size` elements."""
    return tuple(zip(HEADS, (model.num_kv_heads, model.num_groups, size), strict=True))


def _adding_scale(model: ModelConfig, fan_in: int) -> float:
    """Return the initial standard deviation of the two weights of a layer whose results are added to the stream."""
    return 1 / math.sqrt(fan_in * (2 * model.num_layers))
