"""Build the ops of attention (`step.layer`), from the norm before it to its output, from the features of a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.layer import (
    HEADS,
    LINEAR_HEADS,
    SHARED_KEY,
    SHARED_VALUE,
    STREAM,
    Attention,
    Concat,
    Dims,
    Gated,
    GatedDelta,
    LatentKeys,
    LayerOp,
    Linear,
    Norm,
    Rotary,
    SigmoidGate,
    Slice,
    of_layers,
    shortest_cycle,
)
from meshwright.description.step.model import ModelConfig, RotaryPositions

Keys = Literal["own", "values", "shared"]
"""The keys of a layer: its own beside its values, its values too before norm and rotation, or an earlier layer's."""


def attention_ops(model: ModelConfig, layers: range, keys: Keys) -> tuple[LayerOp, ...]:
    """Return the ops of attention from its norm to `attention_added`, which is added to the residual stream."""
    has_norm, has_post_norm = model.norms.is_before, model.norms.is_after
    norms = (model_norm(model, "attention_norm", STREAM, "attention_normed"),) if has_norm else ()
    stream, of_latent = "attention_normed" if has_norm else STREAM, model.attention.latent
    rotary = _rotary(model, model.positions, layers) if isinstance(model.positions, RotaryPositions) else []
    heads = _latent_heads(model, of_latent, stream, rotary) if of_latent else _heads(model, stream, rotary, keys)
    latent = LatentKeys(latent="latent", rotary="key_rope", key_weight="key", value_weight="value")
    attention = Attention(
        query="query",
        key=SHARED_KEY if keys == "shared" else "key",
        value=SHARED_VALUE if keys == "shared" else "value",
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
        is_sharing=keys == "shared",
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
        init_scale=adding_scale(model, model.num_heads * model.value_dim),
        has_bias=model.biases.output,
    )
    ops = (*norms, *heads, attention, *gates, output)
    if not has_post_norm:
        return ops
    return (*ops, model_norm(model, "attention_post_norm", "attention_output", "attention_added"))


def _heads(model: ModelConfig, stream: str, rotary: list[Rotary], keys: Keys) -> tuple[LayerOp, ...]:
    """Return the ops that compute queries, keys and values from the value named `stream`."""
    single: Dims = (("kv_heads", model.num_kv_heads), ("head_dim", model.head_dim))
    of_queries = _head_dims(model, model.head_dim)
    gate = {"query_gate": of_queries} if model.attention.has_output_gate else {}
    dims = {"query": of_queries, **gate}
    if keys != "shared":
        dims |= {"key": single, "value": single}
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
        if name != "value" or keys != "values"
    ]
    if model.attention.has_value_norm and keys != "shared":
        # Before the norm of keys, which may be the values too.
        source = "key" if keys == "values" else "value"
        norm = model_norm(model, "value_norm", source, "value", single[-1:])
        ops.append(replace(norm, offset=0.0, has_scale=False))
    norms: list[LayerOp] = []
    if qk_norm := model.attention.qk_norm:
        norms = [
            model_norm(model, f"{name}_norm", name, name, dims[name] if qk_norm == "all heads" else dims[name][-1:])
            for name in ("query", "key")
            if name in dims
        ]
    if keys == "shared":
        rotary = [replace(each, values=("query",)) for each in rotary[:1]]
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

    def latent_norm(name: str, size: int) -> Norm:
        return replace(model_norm(model, f"{name}_norm", name, name, (("latent", size),)), epsilon=latent.norm_epsilon)

    ops: list[LayerOp] = [
        to_latent("latent", "latents", rank + rope),
        Slice(source="latents", target="latent", start=0, size=rank),
        Slice(source="latents", target="key_rope", start=rank, size=rope),
        latent_norm("latent", rank),
    ]
    if latent.query_rank:
        inputs: Dims = (("latent_input", latent.query_rank),)
        ops += [
            to_latent("query_latent", "query_latent", latent.query_rank),
            latent_norm("query_latent", latent.query_rank),
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


def linear_attention_ops(model: ModelConfig) -> tuple[LayerOp, ...]:
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
    head_norm = replace(model_norm(model, "linear_norm", "linear_heads", "linear_normed", values[-1:]), offset=0.0)
    output = Linear(
        name="linear_output",
        source="linear_gated",
        target="attention_added",
        inputs=values,
        outputs=(("embed", model.embed),),
        init_scale=adding_scale(model, linear.num_value_heads * linear.value_dim),
    )
    gated = Gated(sources=("linear_gate", "linear_normed"), target="linear_gated")
    norm = model_norm(model, "attention_norm", STREAM, "attention_normed")
    return norm, *projections, delta, head_norm, gated, output


def model_norm(model: ModelConfig, name: str, source: str, target: str, dims: Dims = ()) -> Norm:
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


def _head_dims(model: ModelConfig, size: int) -> Dims:
    """Return the dims of query heads, each head of `size` elements."""
    return tuple(zip(HEADS, (model.num_kv_heads, model.num_groups, size), strict=True))


def adding_scale(model: ModelConfig, fan_in: int) -> float:
    """Return the initial standard deviation of the two weights of a layer whose results are added to the stream."""
    return 1 / math.sqrt(fan_in * (2 * model.num_layers))
