"""The loss of a decoder in pipeline parallelism: layers in stages over pp, the batch in microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.blocks import layers, program
from meshwright.description.step.layer import Lookup, Stack
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.passes.microbatch import num_moe_layers
from meshwright.description.step.passes.schedule import Schedule, slot_layers
from meshwright.description.step.stages import batch_before_stages, check_stage_remat, num_cycles, staged_stacks
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Remat
from meshwright.errors import MeshwrightError
from meshwright.execution.models.context import KEY_SEGMENTS, LayerContext, Weights, positions_of, with_key_segments
from meshwright.execution.models.decoder import STACKS, number_in_cycles
from meshwright.execution.models.dropout import DropoutRng
from meshwright.execution.models.ends import LossParts, embed, logits, mean_losses, table_in_use
from meshwright.execution.models.layer import run_layer
from meshwright.execution.models.moe import load_of_layers
from meshwright.execution.models.quantised.weights import plain
from meshwright.execution.models.remat import rematerialized
from meshwright.execution.runtime.experts.routing import ExpertLoad
from meshwright.execution.runtime.pipeline.gpipe import pipelined_loss, wait_for_input
from meshwright.execution.runtime.pipeline.one_forward_one_backward import pipelined_loss_1f1b
from meshwright.execution.runtime.pipeline.stages import Layer, LayerOutput, Pipeline
from meshwright.execution.runtime.replicas import stack_replicas, unstack_replicas
from meshwright.execution.runtime.sharding_context import ShardingContext


def staged_loss_and_load(
    params: Weights,
    batch: Mapping[str, Array],
    model: ModelConfig,
    layout: ShardingContext,
    *,
    strategy: Strategy,
    dtype: Any,
    remat: Remat,
    rng: DropoutRng | None = None,
    z_loss: float = 0.0,
) -> tuple[Array, LossParts]:
    """Return the loss of a batch and its parts, pipelined over pp by the strategy's schedule.

    Arguments and result are those of `loss_and_load`, except that the load balancing loss is computed for each
    microbatch, not for the batch. Parameters of layers are stacked over pipeline slots, which are sharded over pp. If
    the rules shard `vocab` over pp too, each stage computes a share of the output head.

    Raises:
        MeshwrightError: the batch does not divide into microbatches, or the schedule does not support `remat`.
    """
    check_stage_remat(remat, layout.mesh, strategy)
    batch = with_key_segments(batch, model, layout, strategy)
    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, params)
    before = layout_before_stages(layout, batch["tokens"].shape[0], strategy) if "dense_layers" in params else layout
    pipeline = _pipeline(specs, model, layout, before, strategy, dtype, remat, z_loss)
    names = [stack.name for stack in staged_stacks(program(model))]
    ends = jax.tree.map(lambda weights: stack_replicas(weights, 0), _without(params, *names))
    stacked = tuple(jax.tree.map(lambda weights: stack_replicas(weights, 1), params[name]) for name in names)
    count = strategy.num_microbatches
    parts: dict[str, Any] = {name: microbatches(array, count, layout) for name, array in batch.items()}
    if rng is not None:
        keys = jnp.broadcast_to(rng.key, (count,))
        parts["rng"] = replace(rng, key=keys, tokens=microbatches(rng.tokens, count, layout))
    run: Any = pipelined_loss_1f1b if strategy.schedule == "1f1b" else pipelined_loss
    loss, (means, loads) = run(pipeline, ends, stacked, parts)
    return loss, LossParts(means, _load_by_layer(loads, pipeline))


def layout_before_stages(layout: ShardingContext, batch: int, strategy: Strategy) -> ShardingContext:
    """Return the layout of the dense layers before the stages, for a batch of `batch` sequences."""
    return replace(layout, rules={**layout.rules, "batch": batch_before_stages(batch, layout.mesh, strategy)})


def _pipeline(
    specs: Mapping[str, Any],
    model: ModelConfig,
    layout: ShardingContext,
    before: ShardingContext,
    strategy: Strategy,
    dtype: Any,
    remat: Remat,
    z_loss: float,
) -> Pipeline:
    """Return the decoder as a `Pipeline`, whose functions take parameters as `stack_replicas` returns them.

    specs: specs of the parameters by path. before: the layout of the embedding and of dense layers before the stages.
    """
    schedule = Schedule(
        stages=layout.mesh.pp,
        microbatches=strategy.num_microbatches,
        kind=strategy.schedule,
        virtual_stages=strategy.virtual_stages,
    )
    stage, has_dense = replace(layout, is_stage=True), "dense_layers" in specs
    stacks = staged_stacks(program(model))

    def whole(ends: Weights, given: Any) -> tuple[Weights, Any]:
        # Without a barrier some compilers gather the embeddings before the first tick and keep them in memory.
        ends, given = lax.optimization_barrier((ends, given))
        of_ends = {name: specs[name] for name in ends}
        return jax.tree.map(lambda rows, spec: unstack_replicas(rows, spec, layout), ends, of_ends), given

    def first(ends: Weights, part: Weights) -> Array:
        ends, part = whole(ends, part)
        x, _ = embed(ends, part["tokens"], positions_of(part, model), model, before, dtype)
        return _dense_layers(ends["dense_layers"], x, part, model, before, strategy) if has_dense else x

    def layer_of(stack: Stack, place: int) -> Layer:
        def layer(weights: Weights, x: Array, part: Weights, number: Array) -> LayerOutput:
            stored = jax.tree.map(
                lambda rows, spec: unstack_replicas(rows, _of_layer(spec), stage), weights, specs[stack.name]
            )
            context = LayerContext(
                positions=positions_of(part, model),
                layout=stage,
                strategy=strategy,
                rng=_rng(part, STACKS.index("layers"), number_in_cycles(number, place, len(stacks))),
                layer=number,
            )
            result = run_layer(stack, x, plain(stored, x.dtype), context)
            if result.load is None:
                return LayerOutput(result.stream)
            return LayerOutput(result.stream, *_balance(result.load, model))

        return rematerialized(wait_for_input(layer), remat)

    def last(ends: Weights, x: Array, part: Weights) -> Array:
        ends, x = whole(_without(ends, "dense_layers"), x)
        with jax.named_scope("loss"):
            scores = logits(ends, x, table_in_use(ends, layout, dtype), model, layout, part.get("rng"))
            return mean_losses(scores, part, z_loss)

    if has_dense or any(isinstance(op, Lookup) and op.low_rank for op in program(model).embedding):
        first = jax.checkpoint(first)
    return Pipeline(
        first,
        tuple(layer_of(stack, place) for place, stack in enumerate(stacks)),
        last,
        schedule,
        num_cycles(model),
        loss_shape=(1 if z_loss == 0 else 2,),
    )


def _dense_layers(
    weights: Weights, x: Array, part: Weights, model: ModelConfig, layout: ShardingContext, strategy: Strategy
) -> Array:
    """Return the residual stream after the dense layers before the stages, for one microbatch `part`."""
    others = {name: array for name, array in part.items() if name != KEY_SEGMENTS}
    placed = jax.tree.map(lambda array: layout.place(array, "batch", "sequence") if array.ndim == 2 else array, others)
    if KEY_SEGMENTS in part:
        placed[KEY_SEGMENTS] = layout.place(part[KEY_SEGMENTS], "batch", "activation")
    part = placed
    positions, stack = positions_of(part, model), layers(model)[0]

    def layer(x: Array, own: tuple[Weights, Array]) -> tuple[Array, None]:
        weights, number = own
        rng = _rng(part, STACKS.index("dense_layers"), number)
        context = LayerContext(positions=positions, layout=layout, strategy=strategy, rng=rng, layer=number)
        return run_layer(stack, x, plain(weights, x.dtype), context).stream, None

    return lax.scan(layer, x, (weights, jnp.arange(stack.num_layers)))[0]


def _without(weights: Weights, *stacks: str) -> Weights:
    return {name: array for name, array in weights.items() if name not in stacks}


def _rng(part: Weights, stack: int, number: Array) -> DropoutRng | None:
    """Return the dropout of a microbatch `part` in layer `number` of a stack; None without dropout."""
    return part["rng"].fold_in(stack).fold_in(number) if "rng" in part else None


def _of_layer(spec: P) -> P:
    """Return the spec of one layer's array, given the spec of the stacked array."""
    return P(*spec.partitions[1:], reduced=spec.reduced)


def _balance(load: Array, model: ModelConfig) -> tuple[Array | None, Array]:
    """Return a layer's share of the load balancing loss (None without experts), and its load [3, e] of all devices."""
    load = jnp.sum(load, axis=0)
    if model.experts is None:
        return None, load
    balance_loss = ExpertLoad(load[0], load[1], load[2]).balance_loss
    return model.experts.balance_weight * balance_loss / num_moe_layers(model), load


def _load_by_layer(loads: Sequence[Array | None], pipeline: Pipeline) -> ExpertLoad | None:
    """Return the load of each layer with experts, in the order of layers; None if there are none.

    loads: for each layer of a cycle, its load in each pipeline slot [slots, 3, e]; None without experts.
    """
    schedule = pipeline.schedule
    cycles = slot_layers(pipeline.num_cycles, schedule.stages, schedule.virtual_stages)
    slots = sorted((slot for slot, cycle in enumerate(cycles) if cycle is not None), key=lambda slot: cycles[slot] or 0)
    found = [jax.reshard(load, P(None, None, None))[jnp.array(slots)] for load in loads if load is not None]
    return load_of_layers([load[:, None] for load in found]) if found else None


def microbatches(batch: Array, count: int, layout: ShardingContext, *, group_size: int = 1) -> Array:
    """Split an array [b, s], or [b], into `count` microbatches [count, b / count, s] without communication.

    group_size: number of successive rows that stay in one microbatch.

    Raises:
        MeshwrightError: the shards of the batch do not divide into `count` microbatches.
    """
    size, rest = batch.shape[0], batch.shape[1:]
    shards = layout.mesh.degree(layout.axes("batch"))
    if size % (shards * count * group_size):
        raise MeshwrightError(
            f"batch {size} cannot be cut into {count} microbatches on {shards} shards:"
            f" {size} % {shards * count} = {size % (shards * count)}; use a multiple of {shards * count}"
        )
    split, *rest_split = jax.typeof(batch).sharding.spec
    groups = (size // (count * group_size), count, *((group_size,) if group_size > 1 else ()), *rest)
    inner = (None,) * (len(groups) - len(rest) - 1)
    cut = jnp.moveaxis(lax.reshape(batch, groups, out_sharding=P(split, *inner, *rest_split)), 1, 0)
    return lax.reshape(cut, (count, size // count, *rest), out_sharding=P(None, split, *rest_split))
