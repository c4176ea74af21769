"""Loss and gradients of a batch, accumulated over microbatches; gradient sums over devices are deferred to the end.

With several microbatches, or with weights that ZeRO-1 and ZeRO-2 gather once per step, gradients are taken with respect
to weights that all microbatches share: the stored shards (ZeRO-3, where each microbatch gathers them), or the gathered
weights (ZeRO-1, ZeRO-2). These gradients are typed unreduced over replicas, so each device accumulates its own over
microbatches, in the wider of the parameter dtype and the accumulation dtype, and the step ends with one sum over
devices. Gradients of gathered weights are reduce-scattered once at the end (ZeRO-1), or after each microbatch, so that
full gradients are never stored (ZeRO-2). Norm scales and biases do not support unreduced types; their gradients are
summed over devices in each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.layer_inputs import LAYER_INPUT
from meshwright.description.step.parameter_tree import (
    RANK,
    Parameter,
    drop_paths,
    leaves,
    map_leaves,
    merge_trees,
    parameters,
)
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.models.dropout import DropoutRng, token_numbers
from meshwright.execution.models.ends import LossParts
from meshwright.execution.models.pipelined import layout_before_stages, microbatches, staged_loss_and_load
from meshwright.execution.models.quantised.weights import is_quantised
from meshwright.execution.runtime.arrays import DTYPES, widest
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.preference.loss import DPO, PairParts, Preference, pair_loss

Batch = Mapping[str, Array]
Parts = LossParts | PairParts
"""Measurements returned with a loss, of a batch of text or of preference pairs."""


def loss_and_gradients(
    params: Any,
    batch: Batch,
    workload: Workload,
    layout: ShardingContext,
    strategy: Strategy,
    preference: Preference = DPO,
) -> tuple[tuple[Array, Parts], Any]:
    """Return ((loss, parts), gradients) of a batch; gradients are sharded like the parameters.

    Only trained parameters have gradients.

    Args:
        batch: the arrays of `training.step.abstract_batch`: `tokens` and `targets` [b, s]; with dropout also `draws`,
            the step's PRNG key as raw data [2]; for preference pairs also `weights` [b, s] and `reference` [b], the
            log-probability of each row under the reference model.
        workload: the model, its objective and dtypes.
        preference: the loss of preference pairs, for the objective `dpo`.
    """
    if strategy.gradient_dtype:
        layout = replace(layout, gradient_dtype=DTYPES[strategy.gradient_dtype])
    draws = strategy.dropout > 0 or workload.lora_dropout > 0
    if draws:
        key = jax.random.wrap_key_data(batch["draws"], impl="threefry2x32")
        batch = {name: array for name, array in batch.items() if name != "draws"}
        batch |= {"numbers": token_numbers(batch["tokens"].shape, layout, strategy)}
    is_staged, is_whole = layout.mesh.pp > 1, strategy.zero_stage in (1, 2)
    in_use, dtype = layout.gathered if is_whole else layout, DTYPES[workload.compute_dtype]

    def loss_of(params: Any, batch: Batch) -> tuple[Array, Parts]:
        rng = DropoutRng(strategy.dropout, key, batch["numbers"]) if draws else None
        text = {name: array for name, array in batch.items() if name != "numbers"}
        run: Callable[..., tuple[Array, Parts]] = partial(
            staged_loss_and_load if is_staged else loss_and_load, z_loss=workload.z_loss
        )
        if workload.objective == "dpo":
            run = partial(pair_loss, preference=preference)
        return run(params, text, workload.config, in_use, dtype=dtype, remat=workload.remat, strategy=strategy, rng=rng)

    if strategy.num_microbatches == 1 and not is_whole and not is_staged:

        def of_trained(trained: Any) -> tuple[Array, Parts]:
            return loss_of(merge_trees(params, trained), batch)

        return jax.value_and_grad(of_trained, has_aux=True)(drop_paths(params, workload.frozen_paths))
    return _accumulated(loss_of, params, batch, workload, layout, strategy)


def evaluated_means(
    params: Any,
    batch: Batch,
    workload: Workload,
    layout: ShardingContext,
    strategy: Strategy,
    preference: Preference = DPO,
) -> Array:
    """Evaluate a batch by a forward pass, without dropout, z-loss or the MoE auxiliary loss.

    Returns:
        For text [1]: the mean cross-entropy of the batch's tokens in nats. For preference pairs [7]: the means over the
        batch's pairs that `training.preference.loss.MEANS` names, computed with the loss `preference`.
    """
    dtype = DTYPES[workload.compute_dtype]
    run: Callable[..., tuple[Array, Parts]] = staged_loss_and_load if layout.mesh.pp > 1 else loss_and_load
    if workload.objective == "dpo":
        run = partial(pair_loss, preference=preference)
    group_size = 2 if workload.objective == "dpo" else 1
    count = strategy.num_microbatches if layout.mesh.pp == 1 else 1

    def part(batch: Batch) -> Array:
        _, parts = run(
            params, batch, workload.config, layout, dtype=dtype, remat=workload.remat, strategy=strategy, rng=None
        )
        return parts.means

    if count == 1:
        return part(batch)
    # Evaluate in microbatches, as in the train step: the logits of a whole batch may not fit in memory.
    batches = {name: microbatches(array, count, layout, group_size=group_size) for name, array in batch.items()}
    return jax.lax.map(part, batches).mean(axis=0)


def _accumulated(
    loss_of: Callable[[Any, Batch], tuple[Array, Parts]],
    params: Any,
    batch: Batch,
    workload: Workload,
    layout: ShardingContext,
    strategy: Strategy,
) -> tuple[tuple[Array, Parts], Any]:
    """Return ((loss, parts), gradients) of a batch, accumulated over microbatches.

    The loss and the means in `parts` are averaged over microbatches; the expert load in `parts` is summed.

    loss_of: returns (loss, parts) of parameters and a microbatch.
    """
    # A pipeline splits the batch into microbatches itself; each device accumulates the gradients of its own stages.
    count = strategy.num_microbatches if layout.mesh.pp == 1 else 1
    stage, dtype, frozen = strategy.zero_stage, DTYPES[workload.compute_dtype], workload.frozen_paths
    trained = drop_paths(params, frozen)
    sums = layout.gradient_dtype or dtype
    wide = widest(DTYPES[workload.param_dtype], sums)
    shared_weights = shards = _shards(params, layout, workload, strategy)
    scatter: Callable[[Any], Any] | None = None
    if stage in (1, 2):
        shared_weights = _gathered(shards, layout, workload, strategy, dtype)
        scatter = _scatter(drop_paths(shards, frozen), layout, workload, strategy, sums)
        if layout.mesh.pp > 1:
            # A pipeline accumulates gradients in the dtype of its weights.
            shared_weights = _in_dtype(shared_weights, workload, wide)

    def microbatch_gradients(batch: Batch) -> tuple[tuple[Array, Parts], Any]:
        # Without the barrier XLA gathers the tables once for all microbatches, and keeps them whole.
        microbatch_weights, batch = jax.lax.optimization_barrier((shared_weights, batch))

        def microbatch_loss(trained: Any) -> tuple[Array, Parts]:
            value, parts = loss_of(merge_trees(microbatch_weights, trained), batch)
            # Divided here, because unreduced gradients cannot be divided.
            return value / count, parts._replace(means=parts.means / count)

        value, gradients = jax.value_and_grad(microbatch_loss, has_aux=True)(drop_paths(microbatch_weights, frozen))
        return value, scatter(gradients) if scatter and stage == 2 else gradients

    _, to_stored = jax.vjp(
        lambda arrays: _shards(_in_dtype(arrays, workload, sums), layout, workload, strategy), trained
    )
    # Name the phase of collectives to which differentiation gives no name.
    with jax.named_scope("gradients"):
        group_size = 2 if workload.objective == "dpo" else 1
        value, gradients = _sum(microbatch_gradients, batch, count, layout, wide, group_size=group_size)
        if scatter and stage == 1:
            gradients = scatter(gradients)
        return value, to_stored(_in_dtype(gradients, workload, sums))[0]


def _sum(
    part: Callable[[Batch], Any], batch: Batch, count: int, layout: ShardingContext, dtype: Any, *, group_size: int
) -> Any:
    """Return the sum of the results of `part` over microbatches, which run one after the other.

    Args:
        part: computes a tree of arrays from a microbatch.
        count: number of microbatches.
        dtype: dtype of the sums; an array of a wider dtype is summed in its own.
        group_size: number of consecutive rows that stay in one microbatch.
    """
    if count == 1:
        return part(batch)
    batches = {name: microbatches(array, count, layout, group_size=group_size) for name, array in batch.items()}
    made = jax.eval_shape(part, {name: array[0] for name, array in batches.items()})
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, widest(leaf.dtype, dtype), out_sharding=leaf.sharding.spec), made
    )

    def add(total: Any, batch: Batch) -> tuple[Any, None]:
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), total, part(batch)), None

    return jax.lax.scan(add, zeros, batches)[0]


def _shards(params: Any, layout: ShardingContext, workload: Workload, strategy: Strategy) -> Any:
    """Return the stored parameters with types whose gradients are unreduced: the sum over replicas is deferred."""

    def stored(array: Array, parameter: Parameter) -> Array:
        return _layout_of(parameter, layout, workload, strategy).shard(array, *parameter.axes, along=_along(parameter))

    return _map(stored, params, workload)


def _layout_of(
    parameter: Parameter, layout: ShardingContext, workload: Workload, strategy: Strategy
) -> ShardingContext:
    """Return the sharding context of the activations that a parameter multiplies.

    In a pipeline, activations of the dense layers before the MoE layers may be split over pipeline stages too.
    """
    is_before = layout.mesh.pp > 1 and "dense_layers" in parameter.axes
    return layout_before_stages(layout, workload.batch, strategy) if is_before else layout


def _along(parameter: Parameter) -> str:
    """Return the logical axis of the sequence dim of the activations that a parameter multiplies.

    It is `residual_sequence` for parameters that multiply the residual stream itself (routers, position tables, weights
    of a layer's own input, the down projection of a low-rank branch), else `sequence`.
    """
    axes = {*parameter.axes}
    is_of_stream = {"router", "positions", LAYER_INPUT} & axes or {"embed", RANK} <= axes
    return "residual_sequence" if is_of_stream else "sequence"


def _gathered(shards: Any, layout: ShardingContext, workload: Workload, strategy: Strategy, dtype: Any) -> Any:
    """Return the weights gathered over the axes that split only their storage, and cast to `dtype`."""

    def whole(array: Array, parameter: Parameter) -> Array:
        own = _layout_of(parameter, layout, workload, strategy)
        return own.weight(array, *parameter.axes, dtype=dtype, along=_along(parameter))

    return _map(whole, shards, workload)


def _scatter(
    shards: Any, layout: ShardingContext, workload: Workload, strategy: Strategy, dtype: Any
) -> Callable[[Any], Any]:
    """Return a function that reduce-scatters gradients of gathered weights to shards, in `dtype` (ZeRO-1, ZeRO-2)."""
    alone = replace(layout, gradient_dtype=None)
    _, back = jax.vjp(lambda shards: _gathered(shards, alone, workload, strategy, dtype), shards)
    return lambda gradients: back(_in_dtype(gradients, workload, dtype))[0]


def _in_dtype(arrays: Any, workload: Workload, dtype: Any) -> Any:
    """Return arrays cast to `dtype`, except those of norm scales, biases and quantised weights."""
    return _map(lambda array, _: array.astype(dtype), arrays, workload)


def _map(change: Callable[[Array, Parameter], Array], arrays: Any, workload: Workload) -> Any:
    """Return a tree with `change` applied to all arrays except norm scales, biases and quantised weights.

    change: (array, declaration of its parameter) -> array.
    """
    declared = dict(leaves(parameters(workload.model)))

    def changed(path: str, array: Array) -> Array:
        is_as_it_is = declared[path].role == "vector" or is_quantised(array)
        return array if is_as_it_is else change(array, declared[path])

    return map_leaves(changed, arrays)
