"""The train step: loss and gradients, AdamW, and the state it carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.mesh import MeshShape
from meshwright.models import loss
from meshwright.parallel import DTYPES, Layout, abstract, initialise
from meshwright.workload import Workload, check_runnable, parameters, workload_from_data

State = dict[str, Any]
"""`params` and `optimizer`, as trees of arrays."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (arXiv:1711.05101) with clipped gradients, a linear warm-up and a cosine decay to a tenth."""

    learning_rate: float = 3e-3
    warmup_steps: int = 20
    decay_steps: int = 200
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0

    def schedule(self) -> optax.Schedule:
        """The learning rate at each step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=max(self.decay_steps, self.warmup_steps + 1),
            end_value=self.learning_rate / 10,
        )

    def build(self) -> optax.GradientTransformation:
        """The optax transformation; norm scales do not decay."""
        return optax.adamw(self.schedule(), self.b1, self.b2, weight_decay=self.weight_decay, mask=_decays)


def _decays(params: Any) -> Any:
    """True for every parameter that weight decay pulls to zero."""
    return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)


def train_step(
    workload: Workload, layout: Layout, optimizer: Optimizer
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """The step as a jitted function: (state, batch) -> (state, metrics). The state it is given is used up."""
    transformation = optimizer.build()
    dtype = DTYPES[workload.compute_dtype]

    def step(state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        def loss_of(params: Any) -> Array:
            return loss(params, batch, workload.model, layout, dtype=dtype, remat=workload.remat)

        value, gradients = jax.value_and_grad(loss_of)(state["params"])
        with jax.named_scope("update"):
            norm = optax.tree.norm(gradients)
            clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, optimizer.clip_norm / norm), gradients)
            updates, moments = transformation.update(clipped, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            metrics = {"loss": value, "grad_norm": norm}
        return {"params": params, "optimizer": moments}, metrics

    return jax.jit(step, donate_argnums=0)


def initial_state(workload: Workload, layout: Layout, optimizer: Optimizer, mesh: Mesh, *, seed: int) -> State:
    """Parameters drawn into their shards, and moments that lie as they do. To be called under `jax.set_mesh`."""
    params = initialise(parameters(workload.model), jax.random.key(seed), mesh, layout, workload.param_dtype)
    return {"params": params, "optimizer": jax.jit(optimizer.build().init)(params)}


def abstract_state(workload: Workload, layout: Layout, optimizer: Optimizer, mesh: Mesh) -> State:
    """The state as shapes, dtypes and shardings, for lowering and restoring. To be called under `jax.set_mesh`."""
    params = abstract(parameters(workload.model), mesh, layout, workload.param_dtype)
    moments = jax.eval_shape(optimizer.build().init, params)
    # eval_shape knows specs but not devices.
    return {"params": params, "optimizer": jax.tree.map(lambda leaf: _on_mesh(leaf, mesh), moments)}


def _on_mesh(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The same shape, dtype and spec on the devices of `mesh`."""
    spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def abstract_batch(workload: Workload, layout: Layout, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as shapes and shardings."""
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    shape = (workload.batch, workload.seq_len)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in ("tokens", "targets")}


def lower_train_step(mesh: Mesh, *, workload: dict[str, Any]) -> jax.stages.Lowered:
    """The train step lowered for a mesh whose devices need not be there; `workload` as `dataclasses.asdict` has it."""
    read, layout, optimizer = workload_from_data(workload), Layout(MeshShape(**mesh.shape)), Optimizer()
    check_runnable(read.model, layout.mesh)
    with jax.set_mesh(mesh):
        state = abstract_state(read, layout, optimizer, mesh)
        return train_step(read, layout, optimizer).lower(state, abstract_batch(read, layout, mesh))
