"""Build a decoder's ops (`step.layer`) from the features of a `ModelConfig`.

Weights of matmuls that add to the residual stream are initialised smaller by sqrt(2 layers), as in GPT-2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from meshwright.description.step.attention import KeySharing
from meshwright.description.step.attention_ops import (
    Keys,
    adding_scale,
    attention_ops,
    linear_attention_ops,
    model_norm,
)
from meshwright.description.step.layer import (
    STREAM,
    Add,
    Block,
    Combine,
    CrossEntropy,
    Dispatch,
    EndOp,
    Gated,
    LayerOp,
    Linear,
    Lookup,
    Program,
    SigmoidGate,
    Stack,
    of_layers,
    shortest_cycle,
)
from meshwright.description.step.layer_inputs import input_block, input_ops, laurel_ops, mix_ops, stream_matmuls
from meshwright.description.step.lora import with_lora
from meshwright.description.step.model import (
    Experts,
    LearnedPositions,
    Model,
    ModelConfig,
    ProgramModel,
)


@cache
def program(model: Model) -> Program:
    """Return a model's forward pass as ops."""
    if isinstance(model, ProgramModel):
        return model.program
    stacks = model.family.layers(model) or decoder_layers(model)
    inputs, altup = model.layer_inputs, model.altup
    found = Program(
        embedding=embedding_ops(model),
        stacks=stacks,
        logits=logits_ops(model),
        layer_inputs=input_ops(inputs, model.num_layers, model_norm(model, "", STREAM, "")) if inputs else (),
        widening=stream_matmuls(altup, model.embed, "altup_projection") if altup else (),
        narrowing=stream_matmuls(altup, model.embed, "altup_unembedding") if altup else (),
    )
    return with_lora(found, model.lora) if model.lora else found


def layers(model: Model) -> tuple[Stack, ...]:
    """Return a model's stacks of layers, one for each kind of layer."""
    return program(model).stacks


def decoder_layers(model: ModelConfig) -> tuple[Stack, ...]:
    """Return a decoder's stacks: that of the dense layers before MoE layers, if any, then those of all other layers.

    If the other layers are of several kinds, the stacks alternate (`Stack.is_alternating`). If the last layers attend
    to keys and values of earlier ones, they have stacks of their own, and so has the cycle of layers before them.
    """
    if sharing := model.attention.sharing:
        return _sharing_stacks(model, sharing)
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
        ops.append(model_norm(model, "embedding_norm", STREAM, STREAM))
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
        model_norm(model, "final_norm", STREAM, "final"),
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
        router_norm = replace(model_norm(model, "router_norm", STREAM, routed), factor=1 / math.sqrt(model.embed))
        return Block(name="mlp", ops=(*_mlp_and(model, (router_norm, *by_experts)), _last_add(model, "mlp_added")))
    ops: tuple[LayerOp, ...] = (model_norm(model, "mlp_norm", STREAM, normed), *by_experts)
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
        model_norm(model, "mlp_norm", STREAM, "mlp_normed"),
        *_mlp(model, "", "mlp_normed", model.mlp),
        model_norm(model, "mlp_output_norm", "down", "mlp_output"),
        model_norm(model, "experts_norm", STREAM, "experts_normed"),
        *by_experts,
        model_norm(model, "experts_output_norm", "expert_added", "experts_output"),
        Add(sources=("mlp_output", "experts_output"), target="both"),
        model_norm(model, "mlp_post_norm", "both", "mlp_added"),
    )


def _sharing_stacks(model: ModelConfig, sharing: KeySharing) -> tuple[Stack, ...]:
    """Return the stacks of a model whose last layers attend to keys and values of earlier layers.

    The layers with these keys and values are in the stacks `donor_layers`, which have one layer each.
    """
    own = model.num_layers - sharing.num_layers
    windows = of_layers(model.attention.windows, range(model.num_layers))
    donors = {window: layer for layer, window in enumerate(windows[:own])}
    cycle = len(shortest_cycle(windows))
    start = min(donors[window] for window in windows[own:]) // cycle * cycle
    sparse = min(model.altup.num_sparse_layers, start) if model.altup else 0
    between = _stacks(model, "donor_layers", range(start, own), is_one_cycle=True)
    return (
        *_stacks(model, "sparse_layers", range(sparse)),
        *_stacks(model, "layers", range(sparse, start)),
        *(replace(stack, is_donor=start + place in donors.values()) for place, stack in enumerate(between)),
        *_stacks(model, "sharing_layers", range(own, model.num_layers)),
    )


def _stacks(model: ModelConfig, name: str, layers: range, *, is_one_cycle: bool = False) -> tuple[Stack, ...]:
    """Return the stack `name` of some layers; if they are of several kinds, a stack for each position in their cycle.

    The stacks of a cycle are named `{name}_0`, `{name}_1` and so on. is_one_cycle: whether each layer has its own.
    """
    if not layers:
        return ()
    linear, experts, full = model.attention.linear, model.experts, model.attention.full_heads
    sharing, is_sharing = model.attention.sharing, name == "sharing_layers"
    are_linear = of_layers(linear.layers if linear else (False,), layers)
    have_experts = (experts is not None and experts.are_in(layer) for layer in layers)
    by_window = full is not None or sharing is not None
    are_full = (by_window and window is None for window in of_layers(model.attention.windows, layers))
    every = tuple(zip(are_linear, have_experts, are_full, strict=True))
    kinds = shortest_cycle(every)
    if len(layers) % len(kinds) or is_one_cycle:
        kinds = every  # One cycle of all layers.
    num_sparse = model.altup.num_sparse_layers if model.altup else 0
    stacks: list[Stack] = []
    for place, (is_linear, has_experts, is_full) in enumerate(kinds):
        own = layers[place :: len(kinds)]
        of_kind = model.with_full_heads if is_full else model
        are_values_keys = is_full and full is not None and full.are_values_keys
        if sharing and is_sharing:
            of_kind = replace(of_kind, mlp=sharing.mlp)
        keys: Keys = "shared" if is_sharing else "values" if are_values_keys else "own"
        blocks = _blocks(
            of_kind,
            own,
            experts if has_experts else None,
            is_linear=is_linear,
            keys=keys,
            is_sparse=own[0] < num_sparse,
        )
        label = name if len(kinds) == 1 else f"{name}_{place}"
        stacks.append(Stack(name=label, num_layers=len(own), blocks=blocks, is_alternating=place > 0))
    return tuple(stacks)


def _blocks(
    model: ModelConfig, layers: range, experts: Experts | None, *, is_linear: bool, keys: Keys, is_sparse: bool
) -> tuple[Block, ...]:
    """Return the blocks of layers of one kind: attention and MLP (or experts), or one block with both in parallel.

    If layers have inputs of their own, these are the last block.
    """
    attention = linear_attention_ops(model) if is_linear else attention_ops(model, layers, keys)
    if model.parallel_blocks:
        both = Block(name="block", ops=(*attention, *_mlp_ops(model), _add(model, "attention_added", "mlp_added")))
        return (both,)
    if altup := model.altup:
        laurel = laurel_ops(altup, "attention_normed", model_norm(model, "", STREAM, ""))
        sources = "attention_added", "attention_normed", "laurel_added"
        add = replace(_add(model, *sources), factor=math.sqrt(0.5))
        first = Block(name="attention", ops=(*attention, *laurel, add))
    else:
        first = Block(name="attention", ops=(*attention, _add(model, "attention_added")))
    if inputs := model.layer_inputs:
        sparsity = altup.sparsity if altup and is_sparse else 0.0
        ops = (replace(op, sparsity=sparsity) if isinstance(op, Gated) else op for op in _mlp_ops(model))
        mlp = Block(name="mlp", ops=(*ops, _add(model, "mlp_added")))
        norm = model_norm(model, "", STREAM, "")
        predict = (Block(name="predict", ops=mix_ops(altup, "predict", norm)),) if altup else ()
        return *predict, first, mlp, input_block(inputs, model.activation, norm, _last_add(model), altup)
    dense = Block(name="mlp", ops=(*_mlp_ops(model), _last_add(model, "mlp_added")))
    return first, moe_block(model, experts) if experts else dense


def _mlp_ops(model: ModelConfig) -> tuple[LayerOp, ...]:
    """Return the ops of the MLP from its norm to `mlp_added`, which is added to the residual stream."""
    norms, stream = (), STREAM
    if model.parallel_blocks == "shared norm":
        stream = "attention_normed"
    elif model.norms.is_before:
        norms, stream = (model_norm(model, "mlp_norm", STREAM, "mlp_normed"),), "mlp_normed"
    if not model.norms.is_after:
        return *norms, *_mlp(model, "", stream, model.mlp, target="mlp_added")
    return (
        *norms,
        *_mlp(model, "", stream, model.mlp),
        model_norm(model, "mlp_post_norm", "down", "mlp_added"),
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
        init_scale=adding_scale(model, width),
        has_bias=has_bias,
    )
    return *opened, hidden, down


def _add(model: ModelConfig, *sources: str) -> Add:
    """Return the op that adds the values named `sources` to the residual stream."""
    return Add(sources=sources, scale=model.scales.residual)


def _last_add(model: ModelConfig, *sources: str) -> Add:
    """Return the last op of a layer, which adds these values to the residual stream."""
    return replace(_add(model, *sources), has_layer_scale=model.scales.has_layer)
