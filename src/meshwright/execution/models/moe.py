"""A mixture of experts that replaces a layer's MLP, or is added to a shared MLP.

Dims: b batch, s sequence, d embed, e experts, f width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.description.step.layer import Dispatch, Gated, Linear
from meshwright.description.step.model import Experts
from meshwright.description.step.parameter_tree import CHOICE_BIAS, EXPERT_SCALE
from meshwright.description.step.rules import RULES
from meshwright.description.step.strategy import MatmulDtype
from meshwright.errors import MeshwrightError
from meshwright.execution.models.activation import activate
from meshwright.execution.models.quantised.experts import expert_product
from meshwright.execution.models.quantised.scaled import ScaledWeight, specs
from meshwright.execution.models.remat import INTERMEDIATE, PRODUCT
from meshwright.execution.runtime.experts.dispatch import ExpertAxes, dispatch_combine
from meshwright.execution.runtime.experts.products import expert_of_rows
from meshwright.execution.runtime.experts.routing import ExpertLoad, probabilities, route
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import match_varying, on_shards

STREAM = ("batch", "residual_sequence", "activation")
"""Logical axes of the residual stream [b, s, d] between blocks."""


class MoeOps(NamedTuple):
    """The ops of a mixture of experts from dispatch to the last matmul.

    opened: the first matmuls (gate and up, or up). hidden: the activation of their results. down: the last matmul.
    """

    dispatch: Dispatch
    opened: tuple[Linear, ...]
    hidden: Gated
    down: Linear

    def experts(self, num_stored: int) -> Experts:
        """Return the parameters of routing and dispatch, for weights of `num_stored` experts."""
        op = self.dispatch
        return Experts(
            count=op.num_experts,
            num_active=op.num_active,
            mlp=self.hidden.width,
            capacity_factor=op.capacity_factor,
            routing=op.routing,
            padding=num_stored - op.num_experts,
        )


def moe_layer(
    h: Array,
    logits: Array,
    weights: Mapping[str, Any],
    ops: MoeOps,
    layout: ShardingContext,
    matmul_dtype: MatmulDtype | None = None,
    segments: Array | None = None,
    *,
    is_partial: bool = False,
) -> tuple[Array, Array]:
    """Return the summed output of the experts [b, s, d] for the residual stream h [b, s, d], and their load.

    The load [devices, 3, e] has an entry for each device with different tokens, and for each of the three fields of
    `ExpertLoad`; `load_of_layers` sums it over devices for all layers at once.

    Args:
        logits: router logits [b, s, e].
        weights: the layer's parameters by name.
        matmul_dtype: dtype to which operands of matmuls are quantized; None for no quantization.
        segments: document ids of packed rows [b, s]; 0 is padding, which is not counted and takes no capacity slot.
        is_partial: return the output unreduced over the axes that shard each expert's width, which shard no tokens.
    """
    linears = (*ops.opened, ops.down)
    used = [
        weight
        if isinstance(weight := weights[op.name], ScaledWeight)
        else layout.weight(weight, "expert", *(name for name, _ in (*op.inputs, *op.outputs)), dtype=h.dtype)
        for op in linears
    ]
    num_experts = jax.tree.leaves(used[-1])[0].shape[0]
    # Only one of the devices that split an expert's width adds the bias of its last matmul.
    biases = {
        op.name: layout.weight(
            weights[f"{op.name}_bias"],
            *("activation" if name == "norm" else name for name, _ in op.bias_dims),
            along="residual_sequence" if op is ops.down else "sequence",
        )
        for op in linears
        if op.has_bias
    }
    routed = layout.spec("batch", "residual_sequence", "router")
    # Stop the gradient outside `shard_map`, which would sum zeros over all devices.
    choice_bias = jax.lax.stop_gradient(weights[CHOICE_BIAS]) if ops.dispatch.routing.has_choice_bias else None
    expert_scale = weights[EXPERT_SCALE] if ops.dispatch.routing.has_expert_scale else None
    stream, tokens = layout.spec(*STREAM), layout.axes("batch") + layout.axes("residual_sequence")
    split = _expert_axes(layout, tokens)
    mixed = on_shards(
        partial(
            _moe_on_device,
            ops=ops,
            experts=ops.experts(num_experts),
            split=split,
            is_partial=is_partial,
            sums=layout.axes("activation"),
            matmul_dtype=matmul_dtype,
        ),
        layout,
        in_specs=(
            *(stream, routed, P(), P(), layout.spec("batch", "sequence")),
            {name: jax.typeof(bias).sharding.spec for name, bias in biases.items()},
            *map(specs, used),
        ),
        out_specs=(
            layout.spec(*STREAM, unreduced=split.width) if is_partial else stream,
            P(tokens or None, None, None),
        ),
    )
    added, load = mixed(h, logits, choice_bias, expert_scale, segments, biases, *used)
    return checkpoint_name(added, PRODUCT), load


def _expert_axes(layout: ShardingContext, tokens: tuple[str, ...]) -> ExpertAxes:
    """Return the mesh axes of experts, given the axes that split tokens. Raises if ep splits experts but not tokens."""
    ep, tp = layout.axes("expert"), layout.axes("mlp")
    if not set(ep) <= set(tokens):
        batch = RULES["batch"]
        raise MeshwrightError(
            f"experts are split over {' and '.join(ep)}, and the batch is not; use a batch that is a multiple of"
            f" {'*'.join(batch)}={layout.mesh.degree(batch)}, or ep=1"
        )
    return ExpertAxes(ep, tp, tp if set(tp) <= set(tokens) else ())


def load_of_layers(loads: Sequence[Array]) -> ExpertLoad:
    """Return the load of every layer, summed over all devices; each field is [layers, e].

    loads: for each layer of a cycle of layers, its loads from `moe_layer` in all cycles, [cycles, devices, 3, e].
    """
    if len(loads) == 1:
        sums = jnp.sum(loads[0], axis=1)
    else:
        sums = jnp.sum(jnp.stack(loads, axis=1), axis=2).reshape(-1, *loads[0].shape[2:])
    return ExpertLoad(*jnp.moveaxis(sums, 1, 0))


def _moe_on_device(
    h: Array,
    logits: Array,
    choice_bias: Array | None,
    expert_scale: Array | None,
    segments: Array | None,
    biases: Mapping[str, Array],
    *weights: Array | ScaledWeight,
    ops: MoeOps,
    experts: Experts,
    split: ExpertAxes,
    is_partial: bool,
    sums: tuple[str, ...],
    matmul_dtype: MatmulDtype | None,
) -> tuple[Array, Array]:
    """Run `moe_layer` on one device.

    Args:
        biases: the biases of the ops by name; empty if they have none.
        weights: the weights of the first matmuls, then of the last.
        sums: mesh axes that split the stream's dim d; the first matmuls sum over them.
    """
    times, (*openers, down) = partial(expert_product, matmul_dtype=matmul_dtype), weights
    if split.width and not split.tokens:
        # Each device has all tokens and a shard of each expert: sum gradients once here, not once per matmul.
        h = jax.lax.pcast(h, split.width, to="varying")
    choice = route(logits, experts.num_active, experts.routing, choice_bias, expert_scale)
    is_token = None if segments is None else _local_segments(segments, h, split) > 0
    if is_token is not None and experts.capacity_factor is not None:
        # Padding gets an expert number beyond the last, which has no slot.
        choice = choice._replace(chosen=jnp.where(is_token[..., None], choice.chosen, experts.num_stored))
    keep = partial(checkpoint_name, name=INTERMEDIATE)
    here = dispatch_combine(h, choice, experts, split, keep, is_partial=is_partial)
    rows, shares = here.rows, here.shares
    if split.width and not split.tokens:
        shares = jax.lax.pcast(shares, split.width, to="varying")
    if experts.routing.scales_input:
        rows = (_with_zero_padding(rows, here.sizes).astype(shares.dtype) * shares).astype(h.dtype)
    opened = [checkpoint_name(times(rows, weight, here.sizes), PRODUCT) for weight in openers]
    if biases:
        # Only one of the devices with partial sums adds the bias.
        opened = [
            array + _on_first_device(_bias_of_rows(array, biases[op.name], here.sizes), sums)
            for op, array in zip(ops.opened, opened, strict=True)
        ]
    hidden = _summed_hidden(ops.hidden, opened, sums)
    if not experts.routing.scales_input:
        # Scaled before `down`, so that backward does not need the output of `down`.
        hidden = (hidden.astype(shares.dtype) * shares).astype(h.dtype)
    rows = times(checkpoint_name(hidden, INTERMEDIATE), down, here.sizes)
    if biases:
        own = _on_first_device(jnp.ones_like(shares) if experts.routing.scales_input else shares, split.width)
        rows += _bias_of_rows(rows, biases[ops.down.name], here.sizes) * own.astype(rows.dtype)
    added = here.combine(rows)
    is_chosen = choice.chosen[..., None] == jnp.arange(experts.count)[None, None, None, :]
    if is_token is not None:
        is_chosen &= is_token[..., None, None]
    copies = jnp.sum(is_chosen, axis=(0, 1, 2), dtype=jnp.float32)
    load = ExpertLoad(copies, here.dropped[: experts.count], probabilities(logits, experts.routing, is_token))
    return added, jnp.stack(load)[None]


def _local_segments(segments: Array, h: Array, split: ExpertAxes) -> Array:
    """Return the segments of a device's part of the stream h [b, s, d], a slice of those of the whole sequence.

    They are sliced, not resharded: in pipeline stages XLA would keep only resharded segments, and gather them in each
    layer for attention (JAX 0.10.2).
    """
    if not split.tokens:
        return segments
    return jax.lax.dynamic_slice_in_dim(segments, jax.lax.axis_index(split.tokens) * h.shape[1], h.shape[1], axis=1)


def _bias_of_rows(rows: Array, biases: Array, sizes: Array | None) -> Array:
    """Return the bias of each row's expert, shaped like `rows`, from the `biases` [e, f] of all experts.

    `rows` is [m, f] sorted by expert, of which expert i has `sizes[i]`, or [e, slots, f] if `sizes` is None. Rows after
    those of the last expert get 0.
    """
    rows, biases = match_varying(rows, biases.astype(rows.dtype))
    if sizes is None:
        return jnp.broadcast_to(biases[:, None], rows.shape)
    return biases.at[expert_of_rows(rows.shape[0], sizes)].get(mode="fill", fill_value=0)


def _with_zero_padding(rows: Array, sizes: Array | None) -> Array:
    """Return experts' rows [m, d] with zeros after the first sum(sizes): undefined rows, which gradients would read."""
    if sizes is None:
        return rows
    places, count = match_varying(jnp.arange(rows.shape[0])[:, None], jnp.sum(sizes))
    is_token, rows = match_varying(places < count, rows)
    return jnp.where(is_token, rows, jnp.zeros_like(rows))


def _on_first_device(x: Array, axes: tuple[str, ...]) -> Array:
    """Return x on the first device along mesh axes, and zeros on the others."""
    return jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x


def _summed_hidden(op: Gated, opened: list[Array], sums: tuple[str, ...]) -> Array:
    """Return the activation of the first matmuls' results, which are partial sums over the mesh axes `sums`.

    They are reduce-scattered over f, activated on each device and gathered; if the axes do not divide f, all-reduced.
    """
    if not sums:
        return activate(op, *opened)
    if opened[0].shape[-1] % jax.lax.axis_size(sums):
        return activate(op, *(jax.lax.psum(array, sums) for array in opened))
    own = (jax.lax.psum_scatter(array, sums, scatter_dimension=1, tiled=True) for array in opened)
    return jax.lax.all_gather(activate(op, *own), sums, axis=1, tiled=True)
