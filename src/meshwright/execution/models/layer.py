"""Run a layer op by op, with one function for each type of op in `step.layer`.

Ops that share communication run as a group: consecutive matmuls with the same input gather it once, or share a ring
(`models.linear`), and expert ops from dispatch to combine run in one `shard_map` (`models.moe`). A matmul result that
is added to the residual stream is reduce-scattered; if one `Add` has several such results, they are summed before one
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import (
    STREAM,
    Add,
    Attention,
    Block,
    Combine,
    Concat,
    Dispatch,
    Gated,
    GatedDelta,
    LayerOp,
    Linear,
    Mix,
    Norm,
    Rotary,
    SigmoidGate,
    Slice,
    Stack,
    vector_dims,
)
from meshwright.description.step.layer_inputs import ALTUP_ACTIVE, LAYER_INPUT, STREAMS
from meshwright.description.step.parameter_tree import ALTUP_SCALE, LAYER_SCALE, LORA_M, SINKS
from meshwright.execution.models.activation import activate
from meshwright.execution.models.adapters import column_norms, factors, magnitude_over_norm
from meshwright.execution.models.attention_layer import attention_layer
from meshwright.execution.models.context import LayerContext, Weights
from meshwright.execution.models.dropout import ATTENTION, MLP, OWN_INPUT, dropout
from meshwright.execution.models.generation.cache import Cache
from meshwright.execution.models.generation.delta_state import DeltaCache
from meshwright.execution.models.generation.paged_cache import PagedCache
from meshwright.execution.models.generation.stationary import (
    WEIGHTS,
    gather_hidden,
    low_rank_of_rows,
    scatter_hidden,
    stationary_product,
    sum_of_heads,
)
from meshwright.execution.models.latent_attention import latent_attention, latent_of, with_absorbed_latents
from meshwright.execution.models.linear import (
    GATHERED,
    RESIDUAL,
    column_parallel_linear,
    low_rank_columns,
    low_rank_residual,
    low_rank_rows,
    residual_linear,
    result_dtype,
    row_parallel_linear,
)
from meshwright.execution.models.linear_attention import linear_attention
from meshwright.execution.models.moe import MoeOps, moe_layer
from meshwright.execution.models.norm import norm
from meshwright.execution.models.quantised.scaled import as_declared
from meshwright.execution.models.remat import INTERMEDIATE, PRODUCT
from meshwright.execution.models.rotary import is_of_kind, rotate
from meshwright.execution.models.streams import added as added_to_others
from meshwright.execution.models.streams import corrected, predicted
from meshwright.execution.runtime.sharding_context import ShardingContext


class LayerResult(NamedTuple):
    """The results of a layer.

    stream: the residual stream [b, s, d]. cache: this layer's keys and values [b, s, k, h]; in generation, the
    updated cache of all layers with this layer's window. load: the load of its experts [devices, 3, e], see
    `moe_layer`.
    """

    stream: Array
    cache: Cache | PagedCache | DeltaCache | None
    load: Array | None


@dataclass
class _Run:
    """The state of a layer while its ops run.

    values: inputs and results of ops by name. partial: for each value that is a partial sum over tp, by name, the bias
    to add after the sum, or None. branches: for these values, by name, the output of the low-rank branch, which is also
    added after the sum. whole: gathered inputs of the block's matmuls (see `column_parallel_linear`). used: gathered
    weights of the layer (see `residual_linear`).
    """

    weights: Weights
    context: LayerContext
    values: dict[str, Array]
    partial: dict[str, Array | None] = field(default_factory=dict)
    branches: dict[str, Array] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)
    used: dict[str, Array] = field(default_factory=dict)
    cache: Cache | PagedCache | DeltaCache | None = None
    load: Array | None = None


def run_layer(stack: Stack, x: Array, weights: Weights, context: LayerContext) -> LayerResult:
    """Run one layer of a stack on the residual stream x [b, s, d], with AltUp on all streams [b, s, streams, d]."""
    run = _Run(weights, context, {STREAM: x} if x.ndim == 3 else {STREAMS: x, STREAM: x[:, :, 0]})
    if context.own_input is not None:
        run.values[LAYER_INPUT] = context.own_input
    for block in stack.blocks:
        run.whole.clear()
        with jax.named_scope(block.name):
            for ops in _groups(block if context.cache is None else with_absorbed_latents(block)):
                LOWERINGS[type(ops[0])](run, block, *ops)
    return LayerResult(run.values[STREAM if x.ndim == 3 else STREAMS], run.cache, run.load)


def _run_norm(run: _Run, _: Block, op: Norm) -> None:
    bias, x = run.weights[f"{op.name}_bias"] if op.has_bias else None, run.values[op.source]
    normed = norm(x, op, run.weights[op.name] if op.has_scale else None, bias) if any(op.by_layer) else x
    if len(op.by_layer) > 1:
        normed = jnp.where(is_of_kind(True, op.by_layer, run.context.layer), normed, x)
    run.values[op.target] = normed


def _run_linear(run: _Run, block: Block, *ops: Linear) -> None:
    """Run matmuls that read the same value: column-parallel, row-parallel, a router's, or weight-stationary."""
    op, layout, strategy = ops[0], run.context.layout, run.context.strategy
    source = run.values[op.source]
    if layout.cache_split is not None:
        _run_stationary(run, block, *ops)
    elif op.is_on_residual:
        made = residual_linear(source, run.weights[op.name], op, layout, run.used)
        if op.low_rank:
            added = low_rank_residual(source, *factors(run.weights, op.name), op, layout, run.context.rng)
            run.values[op.target] = _with_branch(run, op, made, added)
        else:
            run.values[op.target] = _with_bias(made, _bias(run, op))
    elif op.inputs[0][0] in ("embed", "latent_input"):
        weights = [run.weights[each.name] for each in ops]
        products = column_parallel_linear(source, weights, ops, layout, strategy, run.whole)
        for each, product in zip(ops, products, strict=True):
            if not each.low_rank:
                run.values[each.target] = _with_bias(product, _bias(run, each))
                continue
            added = low_rank_columns(source, *factors(run.weights, each.name), each, layout, run.context.rng)
            run.values[each.target] = _with_branch(run, each, product, added)
    else:
        # A collective matmul sums over tp itself, and DoRA scales the whole sum.
        is_partial = op.target in _summed_together(block) and not (
            strategy.collective_matmul or (op.low_rank is not None and op.low_rank.has_magnitude)
        )
        weight = run.weights[op.name]
        added, bias = row_parallel_linear(source, weight, op, layout, strategy, is_partial=is_partial), _bias(run, op)
        branch = None
        if op.low_rank:
            branch = low_rank_rows(source, *factors(run.weights, op.name), op, layout, run.context.rng)
        if is_partial:
            run.values[op.target], run.partial[op.target] = added, bias
            if branch is not None:
                run.branches[op.target] = branch
        elif branch is None:
            run.values[op.target] = _with_bias(checkpoint_name(added, PRODUCT), bias)
        else:
            run.values[op.target] = _with_branch(run, op, checkpoint_name(added, PRODUCT), branch)


def _with_branch(run: _Run, op: Linear, product: Array, branch: Array) -> Array:
    """Return a matmul's result plus its low-rank branch plus its bias; product and branch are [b, s, *outputs].

    With DoRA, the sum of the first two is multiplied by magnitude / norm of each weight column.
    """
    assert op.low_rank
    if not op.low_rank.has_magnitude:
        return checkpoint_name(_with_bias(product, _bias(run, op)) + branch, PRODUCT)
    layout, weights = run.context.layout, run.weights
    norms = column_norms(weights[op.name], *factors(weights, op.name), op.low_rank.scale)
    norms = checkpoint_name(layout.place(norms, *dict(vector_dims(op.outputs))), PRODUCT)
    share = magnitude_over_norm(weights[f"{op.name}{LORA_M}"], norms)
    total = checkpoint_name(product + branch, PRODUCT)
    scaled = total.astype(jnp.float32) * lax.broadcast_to_rank(share, total.ndim)
    return _with_bias(scaled.astype(total.dtype), _bias(run, op))


def _run_stationary(run: _Run, block: Block, *ops: Linear) -> None:
    """Run matmuls whose weights are not gathered (see `generation.stationary`)."""
    layout = run.context.layout
    source = run.values[ops[0].source]
    if ops[0].inputs[0][0] == "embed" and not ops[0].is_on_residual:
        source = layout.place(source, *GATHERED)
    for op in ops:
        dtype = result_dtype(op, source) if op.is_on_residual else None
        made = stationary_product(source, run.weights[op.name], op, layout, dtype)
        if op.low_rank and run.context.slots is not None:
            made += low_rank_of_rows(source, *factors(run.weights, op.name), op, layout, run.context.slots)
        bias = _bias(run, op)
        if op.is_on_residual:
            columns = "activation" if op.outputs[0][0] == "embed" else op.outputs[0][0]
            run.values[op.target] = _with_bias(layout.place(made, *RESIDUAL[:2], columns), bias)
        elif op.inputs[0][0] == "latent_input":
            run.values[op.target] = made
        elif op.inputs[0][0] != "embed" and op.target in _summed_together(block, _sums_experts_late(layout)):
            run.values[op.target], run.partial[op.target] = made, bias
        elif op.inputs[0][0] != "embed":
            run.values[op.target] = _with_bias(layout.place(made, *RESIDUAL), bias, is_split=True)
        elif op.outputs[0][0] == "mlp":
            run.values[op.target] = _with_bias(scatter_hidden(made, layout), bias, is_split=True)
        elif op.target not in _attention_inputs(block):
            # Inputs of linear attention and of gates: a device has all rows and tokens of its heads.
            run.values[op.target] = _with_bias(layout.place(made, "batch", "sequence", *dict(op.outputs)), bias)
        else:
            is_latent, is_prompt = latent_of(block) is not None, run.context.cache is None
            summed = sum_of_heads(made, op, layout, is_latent=is_latent, is_prompt=is_prompt)
            run.values[op.target] = _with_bias(summed, bias)


def _run_rotary(run: _Run, _: Block, op: Rotary) -> None:
    for name in op.values:
        rotated = rotate(run.values[name], op, run.context.positions.tables, run.context.layer)
        run.values[name] = checkpoint_name(rotated, INTERMEDIATE)


def _run_attention(run: _Run, _: Block, op: Attention) -> None:
    query, latent = run.values[op.query], op.latent
    if latent is None:
        new = run.context.shared if op.is_sharing else Cache(run.values[op.key], run.values[op.value])
        sinks = run.weights[SINKS] if op.has_sinks else None
        run.values[op.target], run.cache = attention_layer(query, new, sinks, op, run.context)
        return
    latents = Cache(*(run.values[name][:, :, None] for name in (latent.latent, latent.rotary)))
    if run.context.cache is not None:
        of_key, of_value = (
            as_declared(run.weights[name], run.context.layout, query.dtype)
            for name in (latent.key_weight, latent.value_weight)
        )
        run.values[op.target], run.cache = latent_attention(query, latents, of_key, of_value, op, run.context)
    else:
        new = Cache(run.values[op.key], run.values[op.value])
        run.values[op.target] = attention_layer(query[:, :, :, None], new, None, op, run.context)[0]
        run.cache = latents


def _run_gated_delta(run: _Run, _: Block, op: GatedDelta) -> None:
    run.values[op.target], run.cache = linear_attention(run.values, run.weights, op, run.context)


def _run_slice(run: _Run, _: Block, op: Slice) -> None:
    run.values[op.target] = run.values[op.source][..., op.start : op.start + op.size]


def _run_concat(run: _Run, _: Block, op: Concat) -> None:
    """Concatenate values [b, s, heads, h] along h; a value without heads [b, s, h] is broadcast to all heads."""
    first, *others = (run.values[name] for name in op.sources)
    spec = jax.typeof(first).sharding.spec
    beside = [
        lax.broadcast_in_dim(x, (*first.shape[:3], x.shape[-1]), (0, 1, 3), out_sharding=spec) if x.ndim == 3 else x
        for x in others
    ]
    run.values[op.target] = checkpoint_name(jnp.concatenate([first, *beside], axis=-1), INTERMEDIATE)


def _run_gated(run: _Run, _: Block, op: Gated) -> None:
    hidden = activate(op, *(run.values[name] for name in op.sources))
    is_split = run.context.layout.cache_split is not None and not op.is_on_residual
    run.values[op.target] = gather_hidden(hidden, run.context.layout) if is_split else hidden


def _run_sigmoid_gate(run: _Run, _: Block, op: SigmoidGate) -> None:
    source = run.values[op.source]
    run.values[op.target] = source * jax.nn.sigmoid(run.values[op.by]).astype(source.dtype)


def _run_experts(run: _Run, block: Block, *ops: LayerOp) -> None:
    dispatch, *opened, hidden, down, combine = ops
    assert isinstance(dispatch, Dispatch)
    assert isinstance(hidden, Gated)
    assert isinstance(down, Linear)
    assert isinstance(combine, Combine)
    linears = tuple(op for op in opened if isinstance(op, Linear))
    segments = run.context.positions.segments
    layout = run.context.layout
    is_partial = combine.target in _summed_together(block, _sums_experts_late(layout))
    with jax.named_scope(WEIGHTS) if layout.cache_split is not None else nullcontext():
        added, run.load = moe_layer(
            run.values[dispatch.source],
            run.values[dispatch.router],
            run.weights,
            MoeOps(dispatch, linears, hidden, down),
            layout,
            run.context.strategy.matmul_dtype,
            None if segments is None else segments.ids,
            is_partial=is_partial,
        )
    run.values[combine.target] = added
    if is_partial:
        run.partial[combine.target] = None


def _run_add(run: _Run, block: Block, op: Add) -> None:
    """Add values to the residual stream; partial sums over tp are added first and reduce-scattered once."""
    if op.target != STREAM:
        run.values[op.target] = _sum([run.values[name] for name in op.sources])
        return
    layout, rng = run.context.layout, run.context.rng
    partial = [name for name in op.sources if name in run.partial]
    values = [run.values[name] for name in op.sources if name not in run.partial]
    if partial:
        summed = layout.place(_sum([run.values[name] for name in partial]), *RESIDUAL)
        biases = [bias for name in partial if (bias := run.partial[name]) is not None]
        branches = [run.branches[name] for name in partial if name in run.branches]
        summed = checkpoint_name(_sum([summed, *branches]), PRODUCT)
        values.append(_with_bias(summed, _sum(biases) if biases else None))
    place = {"mlp": MLP, LAYER_INPUT: OWN_INPUT}.get(block.name, ATTENTION)
    added = _sum(values) if op.scale == 1.0 else _sum(values) * jnp.asarray(op.scale, values[0].dtype)
    after = run.values[op.target] + dropout(added, rng, layout, place)
    after = after if op.factor == 1.0 else after * jnp.asarray(op.factor, after.dtype)
    if op.has_layer_scale:
        after = after * lax.stop_gradient(run.weights[LAYER_SCALE]).astype(after.dtype).reshape(1, 1, 1)
    run.values[op.target] = after


def _run_mix(run: _Run, _: Block, op: Mix) -> None:
    streams, source = run.values[STREAMS], run.values[op.source]
    if op.kind == "add":
        run.values[STREAMS] = added_to_others(streams, source)
        return
    weight = run.weights[f"altup_{op.kind}"]
    if op.kind == "predict":
        run.values[STREAMS] = streams = predicted(streams, source, weight)
        run.values[STREAM] = streams[:, :, 0]
        return
    run.values[STREAMS] = streams = corrected(streams, run.values[STREAM], source, weight)
    scale = run.weights[ALTUP_SCALE].astype(streams.dtype)
    run.values[ALTUP_ACTIVE] = streams[:, :, 0] * lax.broadcast_to_rank(scale, 3)


LOWERINGS: Mapping[type, Callable[..., None]] = {
    Norm: _run_norm,
    Linear: _run_linear,
    Rotary: _run_rotary,
    Attention: _run_attention,
    GatedDelta: _run_gated_delta,
    Slice: _run_slice,
    Concat: _run_concat,
    Gated: _run_gated,
    Dispatch: _run_experts,
    SigmoidGate: _run_sigmoid_gate,
    Add: _run_add,
    Mix: _run_mix,
}
"""The function that runs a group of ops, by the type of the group's first op."""


@lru_cache(maxsize=256)
def _groups(block: Block) -> tuple[tuple[LayerOp, ...], ...]:
    """Return the ops of a block in order, divided into the groups that run together."""
    ops, groups, start = block.ops, [], 0
    while start < len(ops):
        first, stop = ops[start], start + 1
        if isinstance(first, Dispatch):
            stop = next(number for number, op in enumerate(ops) if isinstance(op, Combine)) + 1
        elif isinstance(first, Linear):
            while stop < len(ops) and _can_share_gather(first, ops[stop]):
                stop += 1
        groups.append(ops[start:stop])
        start = stop
    return tuple(groups)


def _can_share_gather(first: Linear, other: LayerOp) -> bool:
    """Whether `other` is a matmul with the same input as `first`, gathered over the same mesh axes."""
    return (
        isinstance(other, Linear)
        and not first.is_on_residual
        and (first.source, first.inputs, first.outputs[0][0]) == (other.source, other.inputs, other.outputs[0][0])
    )


def _sums_experts_late(layout: ShardingContext) -> bool:
    """Whether experts' partial sums over tp may be added to other partial sums, and reduced with them.

    So it is in decoding without ep, where every device has all tokens.
    """
    return layout.cache_split is not None and not layout.axes("expert") and not layout.axes("residual_sequence")


@lru_cache(maxsize=256)
def _summed_together(block: Block, with_experts: bool = False) -> frozenset[str]:
    """Return the names of values that are summed before their reduce-scatter or all-reduce.

    They are the operands of each `Add` that has several operands, all of them results of matmuls, or of experts too.
    """
    kinds = Linear | Combine if with_experts else Linear
    products = {op.target for op in block.ops if isinstance(op, kinds)}
    adds = (op.sources for op in block.ops if isinstance(op, Add))
    return frozenset(name for names in adds if len(names) > 1 and products.issuperset(names) for name in names)


@lru_cache(maxsize=256)
def _attention_inputs(block: Block) -> frozenset[str]:
    """Return the names of the matmul results that attention, or a latent of it, reads; none for linear attention."""
    gates = {op.by for op in block.ops if isinstance(op, SigmoidGate)}
    if any(isinstance(op, GatedDelta) for op in block.ops):
        return frozenset()
    return frozenset(op.target for op in block.ops if isinstance(op, Linear)) - gates


def _bias(run: _Run, op: Linear) -> Array | None:
    return run.weights[f"{op.name}_bias"] if op.has_bias else None


def _with_bias(x: Array, bias: Array | None, *, is_split: bool = False) -> Array:
    if bias is None:
        return x
    spec: Any = jax.typeof(x).sharding.spec
    # If the last dims are split further than the stored bias (in generation), each device adds its slice of the bias.
    own = jax.reshard(bias.astype(x.dtype), P(*spec[x.ndim - bias.ndim :])) if is_split else bias.astype(x.dtype)
    return x + lax.broadcast_to_rank(own, x.ndim)


def _sum(values: list[Any]) -> Any:
    """Sum one array or more."""
    first, *rest = values
    for value in rest:
        first = first + value
    return first
