"""The train step: loss, gradients and update; and the state that it updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.description.families.registry import workload_from_data
from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Lookup
from meshwright.description.step.legality import check_mesh, check_runnable, check_strategy
from meshwright.description.step.model import Model
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import (
    Parameter,
    Tree,
    drop_paths,
    is_adapter,
    leaves,
    map_leaves,
    merge_trees,
    parameters,
)
from meshwright.description.step.rules import rules_of, stream_rules
from meshwright.description.step.sequence import is_zigzag
from meshwright.description.step.stages import staged_parameters
from meshwright.description.step.strategy import DEFAULT, Strategy, strategy_from_data
from meshwright.description.step.trained import BaseFormat
from meshwright.description.step.workload import Dtype, Workload
from meshwright.execution.models.adapters import first_magnitudes
from meshwright.execution.models.quantised.weights import abstract_quantised, quantised
from meshwright.execution.runtime.arrays import DTYPES, abstract, initialise, widest
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.compiler import compiler_options
from meshwright.execution.training.copies import each_once, sum_over_copies
from meshwright.execution.training.gradients import loss_and_gradients
from meshwright.execution.training.preference.loss import DPO, Preference
from meshwright.execution.training.slots import in_order, to_stage_layout
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.update.skipping import NORM_LIMIT, is_bad, unless
from meshwright.execution.training.update.transformation import transformation
from meshwright.execution.weights.load import load_weights, read_tensors
from meshwright.execution.weights.peft import read_adapter
from meshwright.mesh import MeshShape
from meshwright.planning.cost.model_states import tiled_dims

State = dict[str, Any]
"""Trees of arrays: `params`, `optimizer`, and `master`, float32 copies of parameters if these have a narrower dtype."""


def train_step(
    workload: Workload,
    layout: ShardingContext,
    optimizer: Optimizer,
    strategy: Strategy = DEFAULT,
    preference: Preference = DPO,
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """Return the jitted step (state, batch) -> (state, metrics), which donates the state. Call under `jax.set_mesh`.

    `batch` has the arrays of `abstract_batch`. If it has a limit of the gradient norm (`NORM_LIMIT`), a step with a
    larger norm or a loss that is not finite leaves the state unchanged. `metrics` has scalars by name.

    preference: the loss of preference pairs, for the objective `dpo`.
    """

    def step(state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        batch = dict(batch)
        limit = batch.pop(NORM_LIMIT, None)
        (_, parts), gradients = loss_and_gradients(state["params"], batch, workload, layout, strategy, preference)
        with jax.named_scope("update"):
            gradients = _tables_in_stored_order(sum_over_copies(gradients, workload, layout), workload.model)
            # The norm adds squares of several dtypes, which needs standard promotion.
            with jax.numpy_dtype_promotion("standard"):
                norm = optax.tree.norm(each_once(gradients, workload, layout))
            if optimizer.clip_norm:
                scale = jnp.minimum(1.0, optimizer.clip_norm / norm)
                gradients = jax.tree.map(lambda g: g.astype(widest(g.dtype, scale.dtype)) * scale, gradients)
            metrics = parts.metrics | {"grad_norm": norm}
            updated = _updated(state, gradients, workload, transformation(optimizer, workload, layout, strategy))
            if limit is not None:
                bad = is_bad(metrics["loss"], norm, limit)
                updated, metrics["skipped"] = unless(bad, state, updated), bad.astype(jnp.int32)
            return updated, metrics

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options())


def _tables_in_stored_order(gradients: Mapping[str, Any], model: Model) -> Mapping[str, Any]:
    """Return gradients, of which on TPUs those of embedding tables have the memory layout of their parameters.

    Where it needs less padding, a TPU stores a table [v, d] with the vocabulary innermost, but a lookup's gradient has
    whole rows. Without this, XLA:TPU copies the parameter and its moments to the gradient's layout before the update,
    and back after it (libtpu 0.0.42.1). Outside `jax.shard_map`, XLA would gather a table that two axes split.
    """
    if mesh_platform() != "tpu":
        return gradients
    found, ordered = program(model), dict(gradients)
    for op in (*found.embedding, *found.layer_inputs):
        if isinstance(op, Lookup) and not op.is_positional and op.name in gradients:
            own = gradients[op.name]
            sharding = jax.typeof(own).sharding
            if (order := tiled_dims(sharding.shard_shape(own.shape))) != (0, 1):
                stored = partial(with_layout_constraint, layouts=Layout(order))
                ordered[op.name] = jax.shard_map(stored, in_specs=sharding.spec, out_specs=sharding.spec)(own)
    return ordered


def _updated(state: State, gradients: Any, workload: Workload, rule: optax.GradientTransformation) -> State:
    """Return the state after one update.

    If the state has float32 copies of parameters, these are updated and then cast to the parameters' dtype. Frozen
    parameters have no gradients and stay as they are.

    rule: the optimizer, which takes gradients that are already clipped.
    """
    params, moments = state["params"], state["optimizer"]
    trained = drop_paths(params, workload.frozen_paths)
    stored = state.get("master", trained)
    wide = jax.tree.map(lambda g, to: g.astype(to.dtype), gradients, stored)
    updates, moments = rule.update(wide, moments, stored)
    stored = cast("Tree[Array]", optax.apply_updates(stored, updates))
    if "master" not in state:
        return {"params": merge_trees(params, stored), "optimizer": moments}
    narrow = jax.tree.map(lambda array, to: array.astype(to.dtype), stored, trained)
    return {"params": merge_trees(params, narrow), "optimizer": moments, "master": stored}


def initial_state(
    workload: Workload,
    layout: ShardingContext,
    optimizer: Optimizer,
    mesh: Mesh,
    strategy: Strategy = DEFAULT,
    *,
    seed: int,
    weights: Path | None = None,
    adapter: Path | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> State:
    """Return the initial state, with the shapes and shardings of `abstract_state`. Call under `jax.set_mesh`.

    Parameters are initialised directly into their shards; their random values do not depend on the mesh.

    Args:
        workload: the model and its dtypes.
        weights: a Hugging Face directory to read parameters from instead.
        adapter: a PEFT directory to read the adapters from.
        on_bytes: called with the number of bytes of each part read.
    """
    model, frozen = workload.config, workload.frozen_paths
    first = first_parameters(
        workload, layout, mesh, strategy, seed=seed, weights=weights, adapter=adapter, on_bytes=on_bytes
    )
    wanted = abstract_state(workload, layout, optimizer, mesh, strategy)

    def begin(drawn: Any) -> State:
        drawn = to_stage_layout(drawn, wanted["params"], model, layout, strategy)
        trained = drop_paths(drawn, frozen)
        state = {"params": drawn, "optimizer": transformation(optimizer, workload, layout, strategy).init(trained)}
        state |= {"master": trained} if "master" in wanted else {}
        return jax.tree.map(lambda array, to: jax.reshard(array.astype(to.dtype), to.sharding.spec), state, wanted)

    return jax.jit(begin)(first)


def first_parameters(
    workload: Workload,
    layout: ShardingContext,
    mesh: Mesh,
    strategy: Strategy,
    *,
    seed: int,
    weights: Path | None,
    adapter: Path | None = None,
    paths: Collection[str] | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Any:
    """Return the initial parameters, with layers in model order, sharded as `slots.in_order`.

    Call under `jax.set_mesh`.

    Args:
        workload: the model and its dtypes.
        weights: a Hugging Face directory to read parameters from; None to initialise them randomly.
        adapter: a PEFT directory to read the adapters from; by default they are initialised.
        paths: paths of the parameters to return; all by default.
        on_bytes: called with the number of bytes of each part read.
    """
    model, ordered = workload.config, in_order(layout, workload.config, strategy)
    dtype: Dtype = "f32" if strategy.master_weights else workload.param_dtype
    declared = dict(leaves(parameters(model)))
    used = [path for path in declared if paths is None or path in paths]
    whole = replace(workload, quantize_base=None)
    tensors = None if weights is None else read_tensors(weights)

    def first(paths: Collection[str]) -> Any:
        """Return the parameters at `paths`, read or initialised, in the dtypes in which they are stored."""
        own = drop_paths(parameters(model), declared.keys() - paths)
        wanted: Any = _abstract_parameters(own, mesh, ordered, whole, dtype)
        read: Any = {}
        if tensors is not None and (published := drop_paths(wanted, [path for path in paths if is_adapter(path)])):
            read = load_weights(tensors, replace(model, lora=None), published, on_bytes)
        if not (rest := drop_paths(own, [path for path, _ in leaves(read)])):
            return read
        drawn = initialise(rest, jax.random.key(seed), mesh, ordered, dtype)
        stored = dict(leaves(wanted))
        return merge_trees(map_leaves(lambda path, array: array.astype(stored[path].dtype), drawn), read)

    bases = {path: base for path in used if (base := workload.base_format(path, declared[path]))}
    found = first([path for path in used if path not in bases])
    # While layers are not in their slots, shards are smaller, and no device has a whole weight.
    stored_in = _base_layout(layout, strategy) if ordered == layout else ordered

    @partial(jax.jit, static_argnums=(1, 2))
    def convert(array: Array, parameter: Parameter, base: BaseFormat) -> Any:
        to = abstract_quantised(parameter, base, mesh, stored_in)
        return jax.tree.map(lambda own, to: jax.reshard(own, to.sharding.spec), quantised(array, parameter, base), to)

    for path, base in bases.items():
        # Only one weight at a time is in its unquantised dtype, because all of them may not fit.
        one = map_leaves(lambda _, array: convert(array, declared[path], base), first([path]))  # noqa: B023
        found = merge_trees(found, jax.block_until_ready(one))
    if adapter is None:
        if paths is not None or model.lora is None or not model.lora.dora:
            return found
        begin = jax.jit(lambda params: first_magnitudes(params, model, DTYPES[workload.compute_dtype]))
        return merge_trees(found, begin(found))
    stored = dict(leaves(_abstract_parameters(parameters(model), mesh, ordered, whole, dtype)))
    own: Any = read_adapter(adapter, model)
    return merge_trees(found, map_leaves(lambda path, array: jax.device_put(array, stored[path].sharding), own))


def abstract_state(
    workload: Workload, layout: ShardingContext, optimizer: Optimizer, mesh: Mesh, strategy: Strategy = DEFAULT
) -> State:
    """Return the state as shapes, dtypes and shardings, for lowering and restoring. Call under `jax.set_mesh`.

    If the layout splits layers over pipeline stages, the stacked layers are in slots (`training.slots`).
    """
    params = abstract_params(workload, layout, mesh, strategy)
    state, trained = {"params": params}, drop_paths(_stored(workload, layout, strategy), workload.frozen_paths)
    if strategy.master_weights and workload.param_dtype != "f32":
        state["master"] = abstract(trained, mesh, layout, "f32")
    stored = state.get("master", drop_paths(params, workload.frozen_paths))

    def moments(stored: Any) -> Any:
        """Return the optimizer state after one step; the initial zeros may be sharded differently."""
        rule = transformation(optimizer, workload, layout, strategy)
        return rule.update(stored, rule.init(stored), stored)[1]

    # eval_shape knows specs but not devices.
    kept = jax.tree.map(lambda leaf: _on_mesh(leaf, mesh), jax.eval_shape(moments, stored))
    return state | {"optimizer": kept}


def abstract_params(
    workload: Workload, layout: ShardingContext, mesh: Mesh | AbstractMesh, strategy: Strategy = DEFAULT
) -> Tree[jax.ShapeDtypeStruct]:
    """Return the parameters as shapes, dtypes and shardings; with pipeline stages, the stacked layers are in slots."""
    declared = _stored(workload, layout, strategy)
    base_layout = _base_layout(layout, strategy)
    return _abstract_parameters(declared, mesh, layout, workload, workload.param_dtype, base_layout=base_layout)


def _base_layout(layout: ShardingContext, strategy: Strategy) -> ShardingContext:
    """Return the sharding context of quantised weights: with ZeRO-1 and 2, no axis shards them in storage alone.

    They are never updated, so that no step gathers them.
    """
    return layout.gathered if strategy.zero_stage in (1, 2) else layout


def _abstract_parameters(
    declared: Tree[Parameter],
    mesh: Mesh | AbstractMesh,
    layout: ShardingContext,
    workload: Workload,
    dtype: Dtype,
    *,
    base_layout: ShardingContext | None = None,
) -> Tree[jax.ShapeDtypeStruct]:
    """Return parameters as shapes, dtypes and shardings: trained ones in `dtype`, frozen ones in their stored dtype.

    base_layout: the sharding context of quantised weights; default: `layout`.
    """
    by_path = dict(leaves(declared))

    def stored(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if (base := workload.base_format(path, by_path[path])) is not None:
            return abstract_quantised(by_path[path], base, mesh, base_layout or layout)
        own = workload.stored_dtype(path, by_path[path]) if path in workload.frozen_paths else dtype
        return leaf.update(dtype=DTYPES[own])

    return map_leaves(stored, abstract(declared, mesh, layout, dtype))


def _stored(workload: Workload, layout: ShardingContext, strategy: Strategy) -> Tree[Parameter]:
    """Return the declarations of the parameters as a mesh stores them: layers stacked, vocabulary and heads padded."""
    stages = layout.mesh.degree(layout.axes("layers"))
    model = padded(workload.model, layout.mesh, layout.rules)
    return staged_parameters(model, stages=stages, virtual_stages=strategy.virtual_stages)


def _on_mesh(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return an abstract array of the same shape, dtype and spec, on the devices of `mesh`."""
    spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def abstract_batch(
    workload: Workload, layout: ShardingContext, mesh: Mesh | AbstractMesh, strategy: Strategy = DEFAULT
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a training batch, {name: shape, dtype and sharding}.

    `tokens` and `targets` [b, s] always. If needed: `positions` and `segments` [b, s] of packed documents or reordered
    tokens; `weights` [b, s] of the targets; `reference` [b], the log-probability of each row of pairs under the
    reference; `draws` [2], the PRNG key of the step; `NORM_LIMIT`, a scalar.
    """
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    shape = (workload.sequences, workload.seq_len)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32}
    if workload.packed or is_zigzag(layout.mesh, strategy):
        dtypes["positions"] = jnp.int32
    if workload.packed:
        dtypes |= {"segments": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    if workload.objective == "dpo":
        batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        rows = NamedSharding(mesh, layout.spec("batch"))
        batch["reference"] = jax.ShapeDtypeStruct(shape[:1], jnp.float32, sharding=rows)
    if strategy.dropout or workload.lora_dropout:
        batch["draws"] = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
    if strategy.on_bad_step == "skip":
        batch[NORM_LIMIT] = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    return batch


def lower_train_step(
    mesh: Mesh, *, workload: dict[str, Any], strategy: dict[str, Any] | None = None
) -> jax.stages.Lowered:
    """Lower the train step for a mesh whose devices need not be present.

    Args:
        workload: a `Workload`, as `dataclasses.asdict` writes it.
        strategy: a `Strategy`, as `dataclasses.asdict` writes it; None for the default one.
    """
    read, way, optimizer = workload_from_data(workload), strategy_from_data(strategy or {}), Optimizer()
    layout = ShardingContext(MeshShape(**mesh.shape), rules_of(way))
    check_runnable(read.model, layout.mesh, way)
    check_mesh(read, layout.mesh, stream_rules(way.tp_stream))
    check_strategy(read, layout.mesh, way)
    with jax.set_mesh(mesh):
        state = abstract_state(read, layout, optimizer, mesh, way)
        return train_step(read, layout, optimizer, way).lower(state, abstract_batch(read, layout, mesh, way))
