"""Low-rank adapters of a server by name. The model's parameters have slots, each for the weights of one adapter.

A request names its adapter, and the request's row in a step has the number of the adapter's slot. So one step can have
rows with different adapters. Adapters are loaded and dropped between two steps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.description.families.adapters import read_adapter_config
from meshwright.description.step.blocks import program
from meshwright.description.step.lora import EMBEDDING, UNEMBEDDING
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import (
    LORA_B,
    SLOT,
    Parameter,
    is_adapter,
    leaves,
    map_leaves,
    merge_trees,
    parameters,
)
from meshwright.description.step.serving import SERVING_RULES
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.weights.peft import read_adapter
from meshwright.mesh import MeshShape
from meshwright.serving.engine.request import Adapter
from meshwright.support.field_types import nested

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of a valid adapter name."""

Factors = Mapping[str, Any]
"""The weights of one adapter: a tree of arrays with stacked layers, in the padded shapes of the mesh's parameters."""


class SlotWeights(NamedTuple):
    """An adapter's weights, and the number of the slot to write them into, from 1."""

    slot: int
    factors: Factors


class AdapterTable:
    """The adapters of an engine by name. Only the engine's thread adds adapters; any thread reads and drops them.

    Args:
        model: the model; its field `lora` has the number and rank of the slots.
        mesh: the mesh.
    """

    def __init__(self, model: ModelConfig, mesh: MeshShape) -> None:
        self._model, self._mesh = model, mesh
        self._versions = itertools.count(1)
        self.by_name: dict[str, Adapter] = {}

    @property
    def num_slots(self) -> int:
        """The number of adapters that can be loaded at once."""
        return self._model.lora.slots if self._model.lora else 0

    def read(self, name: str, directory: Path) -> Factors:
        """Return the weights of an adapter in PEFT's format, in the shapes of a slot. The table does not change.

        Raises:
            MeshwrightError: the name is in use or invalid, or the adapter does not fit this model or its slots.
        """
        if not NAME.fullmatch(name):
            raise MeshwrightError(f"the adapter's name is {name[:80]!r}; a name has at most 64 of A-Z a-z 0-9 . _ -")
        if name in self.by_name:
            raise MeshwrightError(f"there is an adapter {name!r} already; unload it first, or use another name")
        if not self.num_slots:
            raise MeshwrightError(f"{self._model.name} has no adapter slots; start the server with --adapter-slots")
        return read_factors(directory, self._model, self._mesh)

    def add(self, name: str, factors: Factors, in_use: Iterable[Adapter], write: Callable[[SlotWeights], None]) -> None:
        """Write an adapter into a free slot, and add its name to the table. Called on the engine's thread.

        Args:
            name: its name.
            factors: its weights, from `read`.
            in_use: the adapters of requests that have not ended. Their slots are not free, even if they were dropped.
            write: writes weights into their slot.

        Raises:
            MeshwrightError: the name is in use by now, or no slot is free.
        """
        if name in self.by_name:
            raise MeshwrightError(f"there is an adapter {name!r} already; unload it first, or use another name")
        held = {adapter.slot: adapter.name for adapter in (*in_use, *self.by_name.values())}
        if (free := next((slot for slot in range(1, self.num_slots + 1) if slot not in held), None)) is None:
            names = ", ".join(sorted(held.values()))
            raise MeshwrightError(
                f"all {self.num_slots} adapter slots are in use, by {names}; unload one, and wait for its requests"
            )
        write(SlotWeights(free, factors))
        # A copy, so that other threads never see a change while they read.
        self.by_name = {**self.by_name, name: Adapter(name, free, next(self._versions))}

    def drop(self, name: str) -> None:
        """Remove an adapter's name: new requests cannot use it; open requests that use it are still answered.

        Raises:
            MeshwrightError: there is no adapter of this name.
        """
        if name not in self.by_name:
            raise MeshwrightError(f"there is no adapter {name[:80]!r}; loaded are {', '.join(self.by_name) or 'none'}")
        self.by_name = {other: adapter for other, adapter in self.by_name.items() if other != name}


def read_factors(directory: Path, model: ModelConfig, mesh: MeshShape) -> Factors:
    """Return an adapter's weights in the shapes of a slot: padded to the slot's rank, zeros where it has no weights.

    The scale of the adapter is multiplied into its B factors.

    Args:
        directory: the adapter, in PEFT's format.
        model: the model; its field `lora` has the rank and the targets of the slots.
        mesh: the mesh, for which heads may be padded or copied.

    Raises:
        MeshwrightError: the adapter is not for this model, has DoRA or targets that the slots lack, or a larger rank.
    """
    assert model.lora is not None
    base, most = replace(model, lora=None), model.lora.rank
    own = read_adapter_config(directory, base)
    if own.rank > most:
        raise MeshwrightError(f"{directory} has rank {own.rank}; the slots of this server take {most} (--adapter-rank)")
    if own.dora:
        raise MeshwrightError(
            f"{directory} has use_dora=True, which is not served by name; add it to the weights (--adapter {directory})"
        )
    if missing := set(own.targets) & {EMBEDDING, UNEMBEDDING} - set(model.lora.targets):
        raise MeshwrightError(
            f"{directory} has an adapter of the {' and the '.join(sorted(missing))}, for which this server's slots have"
            f" no space; start it with one that has it (--adapter NAME={directory})"
        )
    adapted = replace(base, lora=own)
    program(adapted)  # Raises for matmuls that have no slots.
    read = dict(leaves(read_adapter(directory, adapted)))

    def factor(path: str, empty: np.ndarray) -> np.ndarray:
        if (array := read.get(path)) is None:
            return empty
        is_b = path.endswith(LORA_B)
        at = int("." in path) if is_b else array.ndim - 1  # B factors of layers begin with the stacked layer dim.
        padded_rank = np.pad(array, [(0, most - own.rank if dim == at else 0) for dim in range(array.ndim)])
        return fit(padded_rank * np.float32(own.low_rank.scale if is_b else 1), empty.shape)

    return map_leaves(factor, empty_factors(model, mesh))  # type: ignore


def empty_factors(model: ModelConfig, mesh: MeshShape) -> Factors:
    """Return the weights of an adapter that changes nothing: all zeros."""

    def empty(parameter: Parameter) -> np.ndarray:
        at = parameter.axes.index(SLOT)
        return np.zeros((*parameter.shape[:at], *parameter.shape[at + 1 :]), np.float32)

    return nested({path: empty(parameter) for path, parameter in slot_parameters(model, mesh)})


def slot_parameters(model: ModelConfig, mesh: MeshShape) -> Iterable[tuple[str, Parameter]]:
    """Return the path and declaration (with the mesh's padding) of each parameter that holds adapter slots."""
    declared = leaves(parameters(padded(model, mesh, SERVING_RULES)))
    return ((path, parameter) for path, parameter in declared if is_adapter(path))


def with_empty_slots(params: Mapping[str, Any], model: ModelConfig, layout: ShardingContext, dtype: Any) -> Any:
    """Return a model's parameters with adapter slots added, all zeros. Call under `jax.set_mesh`."""
    declared = dict(slot_parameters(model, layout.mesh))

    def zeros() -> dict[str, Array]:
        return {
            path: jnp.zeros(parameter.shape, dtype, out_sharding=layout.spec(*parameter.axes))
            for path, parameter in declared.items()
        }

    return merge_trees(params, nested(jax.jit(zeros)()))


def write_slot(params: Mapping[str, Any], weights: SlotWeights, model: ModelConfig, layout: ShardingContext) -> Any:
    """Return a runner's parameters with an adapter written into a slot; the slots' former arrays are donated.

    Args:
        params: the runner's parameters: each stack of layers is one mapping, or a tuple of one mapping per layer.
        weights: the adapter and its slot.
        model: the model, with its slots (`lora`).
        layout: the sharding context.
    """
    declared, found = dict(slot_parameters(model, layout.mesh)), dict(params)
    for stack, factors in weights.factors.items():
        if not isinstance(factors, Mapping):  # A factor of the embedding or the output head.
            axes = declared[stack].axes
            found[stack] = _write_factor(params[stack], factors, weights.slot, axes.index(SLOT), layout, axes)
            continue
        stored: Any = params[stack]
        is_apart = isinstance(stored, tuple)
        for name, whole in factors.items():
            axes = declared[f"{stack}.{name}"].axes
            at = axes.index(SLOT)
            if not is_apart:
                stored = {**stored, name: _write_factor(stored[name], whole, weights.slot, at, layout, axes)}
                continue
            stored = tuple(
                {**layer, name: _write_factor(layer[name], own, weights.slot, at - 1, layout, axes[1:])}
                for layer, own in zip(stored, whole, strict=True)
            )
        found[stack] = stored
    return found


def _write_factor(
    stored: Array, own: np.ndarray, slot: int, at: int, layout: ShardingContext, axes: tuple[str, ...]
) -> Array:
    """Return a parameter whose slot `slot` (from 1) along dim `at` has the values `own`; `stored` is donated.

    axes: the logical axes of the parameter's dims.
    """
    host, spec = np.expand_dims(own.astype(stored.dtype), at), layout.spec(*axes)
    mesh = stored.sharding.mesh  # type: ignore
    placed = jax.make_array_from_callback(host.shape, jax.sharding.NamedSharding(mesh, spec), lambda index: host[index])
    return slot_program(at)(stored, placed, np.int32(slot - 1))


@lru_cache(maxsize=16)
def slot_program(at: int) -> Any:
    """Return the jitted (stored, own, index) -> stored: it writes `own` at `index` of dim `at`; `stored` is donated."""
    return jax.jit(
        lambda stored, own, index: jax.lax.dynamic_update_slice_in_dim(stored, own, index, at), donate_argnums=0
    )
