"""The forward pass and the loss of a decoder, run from its ops and declared parameters.

Dims: b batch, s sequence, t keys, d embed, f mlp, k kv heads, g query heads per kv head, h head dim, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.description.step import blocks
from meshwright.description.step.layer import Stack, alternating
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Remat
from meshwright.execution.models.attention_layer import whole_keys
from meshwright.execution.models.context import LayerContext, PositionInfo, Weights, positions_of, with_key_segments
from meshwright.execution.models.dropout import DropoutRng
from meshwright.execution.models.ends import LossParts, embed, logits, mean_losses, token_losses
from meshwright.execution.models.generation.cache import Cache
from meshwright.execution.models.layer import LayerResult, run_layer
from meshwright.execution.models.layer_inputs import layer_inputs
from meshwright.execution.models.moe import load_of_layers
from meshwright.execution.models.quantised.weights import plain
from meshwright.execution.models.remat import LAYER_INPUT, rematerialized
from meshwright.execution.models.streams import narrowed, widened
from meshwright.execution.runtime.experts.routing import ExpertLoad
from meshwright.execution.runtime.sharding_context import ShardingContext

STACKS = ("dense_layers", "layers", "donor_layers", "sharing_layers", "sparse_layers")
"""The names of a model's stacks of layers; dropout keys depend on a stack's index here.

Most models have `layers` alone. Alternating stacks (`layers_0`, `layers_1`, …) have the index of `layers`.
"""


def loss_and_load(
    params: Weights,
    batch: Weights,
    model: ModelConfig,
    layout: ShardingContext,
    *,
    dtype: Any,
    remat: Remat,
    strategy: Strategy = DEFAULT,
    rng: DropoutRng | None = None,
    z_loss: float = 0.0,
) -> tuple[Array, LossParts]:
    """Return the loss of a batch, and its parts with the load of each layer's experts, if any.

    The loss is the mean cross-entropy in nats plus the load balancing loss of experts and the z-loss.

    Args:
        batch: `tokens` and `targets` [b, s]. If tokens are not in order or rows have several documents, also
          `positions` [b, s], the document ids `segments` [b, s] (from 1; 0 is padding), and `weights` [b, s], which
          multiply the losses of the targets and have a mean of 1.
        rng: dropout; None for no dropout.
        z_loss: coefficient of the z-loss.
    """
    x, table, load = stream_and_load(params, batch, model, layout, dtype=dtype, remat=remat, strategy=strategy, rng=rng)
    with jax.named_scope("loss"):
        means = mean_losses(logits(params, x, table, model, layout, rng), batch, z_loss)
        value = jnp.sum(means)
        if model.experts is not None and load is not None:
            value += model.experts.balance_weight * load.balance_loss
        return value, LossParts(means, load)


def log_probabilities_and_load(
    params: Weights,
    batch: Weights,
    model: ModelConfig,
    layout: ShardingContext,
    *,
    dtype: Any,
    remat: Remat,
    strategy: Strategy = DEFAULT,
    rng: DropoutRng | None = None,
) -> tuple[Array, ExpertLoad | None]:
    """Return the sum of each row's target log probabilities [b] in nats, and the load of each layer's experts, if any.

    batch: as in `loss_and_load`. Its `weights` [b, s] multiply the log probabilities; 0 excludes a target.
    """
    x, table, load = stream_and_load(params, batch, model, layout, dtype=dtype, remat=remat, strategy=strategy, rng=rng)
    with jax.named_scope("loss"):
        losses = token_losses(logits(params, x, table, model, layout, rng), batch["targets"])
        return -jnp.sum(losses * batch["weights"], axis=-1), load


def stream_and_load(
    params: Weights,
    batch: Weights,
    model: ModelConfig,
    layout: ShardingContext,
    *,
    dtype: Any,
    remat: Remat,
    strategy: Strategy,
    rng: DropoutRng | None,
) -> tuple[Array, Array, ExpertLoad | None]:
    """Return the residual stream [b, s, d] after all layers, the gathered embedding table, and the experts' load."""
    batch = with_key_segments(batch, model, layout, strategy)
    positions = positions_of(batch, model)
    x, table = embed(params, batch["tokens"], positions, model, layout, dtype)
    x, load = through_layers(params, batch["tokens"], x, positions, model, layout, remat, strategy, rng)
    return x, table, load


def through_layers(
    params: Weights,
    tokens: Array,
    x: Array,
    positions: PositionInfo,
    model: ModelConfig,
    layout: ShardingContext,
    remat: Remat,
    strategy: Strategy = DEFAULT,
    rng: DropoutRng | None = None,
) -> tuple[Array, ExpertLoad | None]:
    """Return the residual stream [b, s, d] after all layers, and the load of the experts of the last ones, if any.

    tokens: [b, s]. x: the residual stream before the layers.
    """
    inputs, shared, load = layer_inputs(params, tokens, x, model, layout), Shared(), None
    x = widened(params, x, model, layout)
    for stacks in alternating(blocks.layers(model)):
        own = rng and rng.fold_in(STACKS.index(stacks[0].name.removesuffix("_0")))
        x, load, given = _layers(stacks, params, x, positions, layout, remat, strategy, own, inputs, shared)
        shared = shared | given
    return narrowed(params, x, model, layout), load


def number_in_cycles(cycle: Array, place: int, num_kinds: int) -> Array:
    """Return the number of a layer among layers of `num_kinds` kinds that alternate, given its cycle and its place."""
    return cycle if num_kinds == 1 else cycle * num_kinds + place


class _OfLayer(NamedTuple):
    """What a layer reads besides the residual stream, the fields as in `LayerContext`: its weights and its number."""

    weights: Weights
    number: Array | None
    own_input: Array | None
    shared: Cache | None


Shared = dict[int | None, Cache]
"""Keys and values [b, s, k, h] to which later layers attend, by the window of these layers."""


def _layers(
    stacks: tuple[Stack, ...],
    params: Weights,
    x: Array,
    positions: PositionInfo,
    layout: ShardingContext,
    remat: Remat,
    strategy: Strategy,
    rng: DropoutRng | None,
    inputs: Mapping[str, Array],
    shared: Shared,
) -> tuple[Array, ExpertLoad | None, Shared]:
    """Return the stream after the layers of a stack, the load of their experts, and keys and values for later layers.

    Args:
        stacks: one, or several whose layers alternate (`step.layer.alternating`).
        inputs: as `layer_inputs` returns them.
        shared: keys and values of earlier layers.
    """

    def layer_of(stack: Stack, place: int) -> Callable[..., LayerResult]:
        def layer(x: Array, own: _OfLayer) -> LayerResult:
            weights, number, own_input, keys = own
            # Dequantize inside the loop, so that stored weights are sliced and only one layer's copy exists at a time.
            weights = plain(weights, x.dtype)
            here = None
            if rng is not None and number is not None:
                here = rng.fold_in(number_in_cycles(number, place, len(stacks)))
            context = LayerContext(positions=positions, layout=layout, strategy=strategy, rng=here, layer=number)
            context = replace(context, own_input=own_input, shared=keys)
            result = run_layer(stack, checkpoint_name(x, LAYER_INPUT), weights, context)
            # Only keys and values that later layers read leave the loop over layers.
            return result if stack.is_donor else result._replace(cache=None)

        return rematerialized(layer, remat)

    one_of_each = [layer_of(stack, place) for place, stack in enumerate(stacks)]
    keys_of_each = [
        whole_keys(shared[stack.window], layout, strategy) if stack.is_sharing else None for stack in stacks
    ]

    def cycle(
        x: Array, own: tuple[list[Weights], Array | None, list[Array | None]]
    ) -> tuple[Array, tuple[list[Array], list[Cache | None]]]:
        weights, number, own_inputs = own
        loads, given = list[Array](), list[Cache | None]()
        for layer, its, own_input, keys in zip(one_of_each, weights, own_inputs, keys_of_each, strict=True):
            result = layer(x, _OfLayer(its, number, own_input, keys))
            x = result.stream
            loads += [] if result.load is None else [result.load]
            given.append(result.cache if isinstance(result.cache, Cache) else None)
        return x, (loads, given)

    has_numbers = rng is not None or any(stack.period > 1 for stack in stacks)
    numbers = jnp.arange(stacks[0].num_layers) if has_numbers else None
    each = ([params[stack.name] for stack in stacks], numbers, [inputs.get(stack.name) for stack in stacks])
    x, (loads, given) = jax.lax.scan(cycle, x, each)
    # A stack whose keys and values later layers attend to has one layer.
    keys = {stack.window: Cache(*(array[0] for array in own)) for stack, own in zip(stacks, given, strict=True) if own}
    return x, load_of_layers(loads) if loads else None, keys
