"""Frozen parameters of a run: on resume they are read or initialised again, and compared by fingerprints.

Frozen parameters never change, so checkpoints do not contain them: they come from the run's Hugging Face directory, or
from its seed. A checkpoint has a fingerprint of each one, so that a run never continues with different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.description.step.parameter_tree import drop_paths, leaves, map_leaves, merge_trees
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.quantised.weights import is_quantised
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.step import State, first_parameters


def saved_parts(config: RunConfig, state: State) -> State:
    """Return the parts of a state that a checkpoint stores: without frozen parameters, with their fingerprints.

    The fingerprints are the part `frozen`.
    """
    if not (frozen := config.workload.frozen_paths):
        return state
    trained = drop_paths(state["params"], frozen)
    return state | {"params": trained, "frozen": fingerprints(drop_paths(state["params"], paths_of(trained)))}


def abstract_parts(config: RunConfig, wanted: State, mesh: Mesh) -> State:
    """Return what `saved_parts` returns for the abstract state `wanted`, as shapes, dtypes and shardings."""
    if not (frozen := config.workload.frozen_paths):
        return wanted
    trained = drop_paths(wanted["params"], frozen)
    scalar = jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(mesh, PartitionSpec()))
    others = drop_paths(wanted["params"], paths_of(trained))
    return wanted | {"params": trained, "frozen": map_leaves(lambda *_: scalar, others)}


def with_frozen(
    config: RunConfig,
    found: State,
    layout: ShardingContext,
    mesh: Mesh,
    strategy: Strategy,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> State:
    """Return a restored state with its frozen parameters, which are read or initialised again.

    Args:
        found: the parts of the state from a checkpoint, with layers in model order.
        strategy: the strategy, which determines the sharding of layers in model order.
        on_bytes: called with the number of bytes of each part of weights that is read.

    Raises:
        MeshwrightError: the parameters differ from those with which the run started.
    """
    if "frozen" not in found:
        return found
    weights = Path(config.weights) if config.weights else None
    if weights is not None and not weights.is_dir():
        raise MeshwrightError(
            f"{weights} is not there; this run keeps its weights frozen, and no checkpoint holds them: put it back"
        )
    again = first_parameters(
        config.workload, layout, mesh, strategy,
        seed=config.seed, weights=weights, paths=config.workload.frozen_paths, on_bytes=on_bytes,
    )  # fmt: skip
    now = dict(leaves(fingerprints(again)))
    for path, then in leaves(found["frozen"]):
        if int(now[path]) != int(then):
            source = f"{weights} holds another {path}" if weights else f"seed {config.seed} draws another {path}"
            raise MeshwrightError(
                f"{source} than this run was begun with, which it keeps frozen and no checkpoint holds; put"
                f" {'the weights' if weights else 'the seed'} back"
            )
    rest = {name: part for name, part in found.items() if name != "frozen"}
    return rest | {"params": merge_trees(again, found["params"])}


def paths_of(tree: Any) -> frozenset[str]:
    """Return the paths of a tree's leaves."""
    return frozenset(path for path, _ in leaves(tree))


@jax.jit
def fingerprints(params: Any) -> Any:
    """Return, for each array, a uint32 that identifies its contents: a sum of hashes of each element and its index.

    Integer sums do not depend on their order, so the fingerprint is the same on every mesh.
    """
    return map_leaves(lambda _, array: _fingerprint(array), params)


def _fingerprint(array: Any) -> Array:
    if is_quantised(array):
        values, scale = map(_fingerprint, array)
        return values + jnp.uint32(0x9E3779B1) * scale
    spec = jax.typeof(array).sharding.spec
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    found = lax.bitcast_convert_type(array, width).astype(jnp.uint32)
    stride = 1
    for dim in reversed(range(array.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, array.shape, dim, out_sharding=spec)
        found = found + index * jnp.uint32(stride * 0x9E3779B1 % 2**32)
        stride *= array.shape[dim]
    # The finalizer of MurmurHash3, so that values that differ in few bits get hashes that differ in many.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ (found >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(found ^ (found >> jnp.uint32(16)), dtype=jnp.uint32)
