"""The train step: loss and gradients, the update, and the state it carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.families import workload_from_data
from meshwright.mesh import MeshShape
from meshwright.runtime import ShardingContext, abstract, initialise
from meshwright.runtime.arrays import widest
from meshwright.step import (
    DEFAULT,
    Parameter,
    Strategy,
    Tree,
    Workload,
    check_mesh,
    check_runnable,
    check_strategy,
    is_zigzag,
    parameters,
    rules_of,
    staged_parameters,
    strategy_from_data,
    stream_rules,
)
from meshwright.training.compiler import compiler_options
from meshwright.training.gradients import loss_and_gradients
from meshwright.training.optimizer import Optimizer
from meshwright.training.preference import DPO, Preference
from meshwright.training.slots import in_order, to_stage_layout
from meshwright.training.update.skipping import NORM_LIMIT, is_bad, unless
from meshwright.training.update.transformation import transformation
from meshwright.weights import load_weights, read_tensors

State = dict[str, Any]
"""`params`, `optimizer` and, where it updates float32 copies of narrower parameters, `master`: trees of arrays."""


def train_step(
    workload: Workload,
    layout: ShardingContext,
    optimizer: Optimizer,
    strategy: Strategy = DEFAULT,
    preference: Preference = DPO,
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """The step as a jitted function: (state, batch) -> (state, metrics). The state it is given is used up.

    A batch with a limit for the norm of the gradients (`NORM_LIMIT`) has a step over it left out. preference: how pairs
    make a loss, where the objective is `dpo`.

    To be called under `jax.set_mesh`, whose devices say what their compiler is told.
    """

    def step(state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        batch = dict(batch)
        limit = batch.pop(NORM_LIMIT, None)
        (value, parts), gradients = loss_and_gradients(state["params"], batch, workload, layout, strategy, preference)
        with jax.named_scope("update"):
            # Optax adds up squares of several dtypes, in the widest.
            with jax.numpy_dtype_promotion("standard"):
                norm = optax.tree.norm(gradients)
            if optimizer.clip_norm:
                scale = jnp.minimum(1.0, optimizer.clip_norm / norm)
                gradients = jax.tree.map(lambda g: g.astype(widest(g.dtype, scale.dtype)) * scale, gradients)
            metrics = {"loss": value, "grad_norm": norm}
            if parts is not None:
                metrics |= parts.metrics
            updated = _updated(state, gradients, optimizer, strategy)
            if limit is not None:
                bad = is_bad(value, norm, limit)
                updated, metrics["skipped"] = unless(bad, state, updated), bad.astype(jnp.int32)
            return updated, metrics

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options())


def _updated(state: State, gradients: Any, optimizer: Optimizer, strategy: Strategy) -> State:
    """The state after one update; of parameters with float32 copies these are updated, and then narrowed."""
    stored, moments = state.get("master", state["params"]), state["optimizer"]
    wide = jax.tree.map(lambda g, to: g.astype(to.dtype), gradients, stored)
    updates, moments = transformation(optimizer, strategy).update(wide, moments, stored)
    stored = optax.apply_updates(stored, updates)
    if "master" not in state:
        return {"params": stored, "optimizer": moments}
    params = jax.tree.map(lambda array, to: array.astype(to.dtype), stored, state["params"])
    return {"params": params, "optimizer": moments, "master": stored}


def initial_state(
    workload: Workload,
    layout: ShardingContext,
    optimizer: Optimizer,
    mesh: Mesh,
    strategy: Strategy = DEFAULT,
    *,
    seed: int,
    weights: Path | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> State:
    """Parameters drawn into their shards, and what the optimizer keeps, as `abstract_state` has it.

    What is drawn for a layer does not depend on the mesh. weights: a Hugging Face directory, whose parameters are read
    instead; on_bytes is called with the bytes of each part that was. To be called under `jax.set_mesh`.
    """
    drawn = first_parameters(workload, layout, mesh, strategy, seed=seed, weights=weights, on_bytes=on_bytes)
    wanted = abstract_state(workload, layout, optimizer, mesh, strategy)

    def begin(drawn: Any) -> State:
        drawn = to_stage_layout(drawn, wanted["params"], workload.config, layout, strategy)
        state = {"params": drawn, "optimizer": transformation(optimizer, strategy).init(drawn)}
        state |= {"master": drawn} if "master" in wanted else {}
        return jax.tree.map(lambda array, to: jax.reshard(array.astype(to.dtype), to.sharding.spec), state, wanted)

    return jax.jit(begin)(drawn)


def first_parameters(
    workload: Workload,
    layout: ShardingContext,
    mesh: Mesh,
    strategy: Strategy,
    *,
    seed: int,
    weights: Path | None,
    on_bytes: Callable[[int], None],
) -> Tree[Array]:
    """The parameters that a run begins with, its layers in their order, in the widest dtype that it keeps them in.

    The arguments are those of `initial_state`.
    """
    model, dtype = workload.config, "f32" if strategy.master_weights else workload.param_dtype
    ordered = in_order(layout, model, strategy)
    if weights is None:
        return initialise(parameters(model), jax.random.key(seed), mesh, ordered, dtype)
    return load_weights(read_tensors(weights), model, abstract(parameters(model), mesh, ordered, dtype), on_bytes)


def abstract_state(
    workload: Workload, layout: ShardingContext, optimizer: Optimizer, mesh: Mesh, strategy: Strategy = DEFAULT
) -> State:
    """The state as shapes, dtypes and shardings, for lowering and restoring. To be called under `jax.set_mesh`.

    Layers are stacked over the slots of a pipeline where the layout splits them over its stages.
    """
    declared = _stored(workload, layout, strategy)
    params = abstract(declared, mesh, layout, workload.param_dtype)
    state = {"params": params}
    if strategy.master_weights and workload.param_dtype != "f32":
        state["master"] = abstract(declared, mesh, layout, "f32")
    stored = state.get("master", params)

    def moments(stored: Any) -> Any:
        """What the optimizer keeps after a first step: what it begins with may lie otherwise, as zeros do."""
        rule = transformation(optimizer, strategy)
        return rule.update(stored, rule.init(stored), stored)[1]

    # eval_shape knows specs but not devices.
    kept = jax.tree.map(lambda leaf: _on_mesh(leaf, mesh), jax.eval_shape(moments, stored))
    return state | {"optimizer": kept}


def _stored(workload: Workload, layout: ShardingContext, strategy: Strategy) -> Tree[Parameter]:
    """The declarations of the parameters as a layout stores them."""
    stages = layout.mesh.degree(layout.axes("layers"))
    return staged_parameters(workload.model, stages=stages, virtual_stages=strategy.virtual_stages)


def _on_mesh(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The same shape, dtype and spec on the devices of `mesh`."""
    spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def abstract_batch(
    workload: Workload, layout: ShardingContext, mesh: Mesh, strategy: Strategy = DEFAULT
) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as shapes and shardings."""
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    shape = (workload.sequences, workload.seq_len)
    names = ("tokens", "targets", *(("positions",) if is_zigzag(layout.mesh, strategy) else ()))
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}
    whole = NamedSharding(mesh, PartitionSpec())
    if workload.objective == "dpo":
        batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        rows = NamedSharding(mesh, layout.spec("batch"))
        batch["reference"] = jax.ShapeDtypeStruct(shape[:1], jnp.float32, sharding=rows)
    if strategy.dropout:
        batch["draws"] = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
    if strategy.on_bad_step == "skip":
        batch[NORM_LIMIT] = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    return batch


def lower_train_step(
    mesh: Mesh, *, workload: dict[str, Any], strategy: dict[str, Any] | None = None
) -> jax.stages.Lowered:
    """The train step lowered for a mesh whose devices need not be there.

    `workload` and `strategy` are as `dataclasses.asdict` has them; without one it is the default strategy.
    """
    read, way, optimizer = workload_from_data(workload), strategy_from_data(strategy or {}), Optimizer()
    layout = ShardingContext(MeshShape(**mesh.shape), rules_of(way))
    check_runnable(read.model, layout.mesh, way)
    check_mesh(read, layout.mesh, stream_rules(way.tp_stream))
    check_strategy(read, layout.mesh, way)
    with jax.set_mesh(mesh):
        state = abstract_state(read, layout, optimizer, mesh, way)
        return train_step(read, layout, optimizer, way).lower(state, abstract_batch(read, layout, mesh, way))
