"""Bytes of the training state on one device (parameters, float32 copies, optimizer moments) and of the gradients.

The ZeRO stage (arXiv:1910.02054) determines which of these arrays fsdp shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Lookup
from meshwright.description.step.model import Model
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.passes.muon import matrices, matrices_per_device, short_and_long
from meshwright.description.step.passes.optimizer import factored_dims
from meshwright.description.step.passes.pipeline import is_spmd_pipeline
from meshwright.description.step.rules import RULES, local_parameter_shape, rules_of
from meshwright.description.step.stages import chunk_slots, staged_parameters
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.trained import stored_weight
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape

MOMENTS: Mapping[str, int] = {"adamw": 2, "adamw-8bit": 2, "lion": 1, "sgd": 0, "muon": 1}
"""The number of moment arrays of a parameter's size that each optimizer keeps.

Lion: arXiv:2302.06675. Muon keeps a second moment for the parameters that AdamW updates in its place. sgd is without
momentum. For Adafactor see `factored_elements`.
"""

COUNTERS: Mapping[str, int] = {"adamw": 2, "adamw-8bit": 2, "lion": 2, "adafactor": 2, "sgd": 1, "muon": 2}
"""The number of Optax step counters of each optimizer, four bytes each.

The learning-rate schedule has one, and each gradient transformation with moments has one.
"""

BLOCK_OF_8BIT = 256
"""The number of 8-bit moment elements that share a float32 scale (bitsandbytes, Adam8bit: blockwise quantization)."""

TILE = (8, 128)
"""The rows and columns of the tiles to which a TPU pads a float32 array."""


def trained_elements(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> int:
    """Return the number of trained parameter elements on one device; for a pipeline, on the fullest stage."""
    return States(workload, mesh, strategy).elements


@lru_cache(maxsize=1 << 14)
def stored_elements(
    model: Model,
    mesh: MeshShape,
    *,
    is_tiled: bool = False,
    virtual_stages: int = 0,
    without: frozenset[str] = frozenset(),
) -> tuple[int, int]:
    """Return the numbers of parameter elements on one device: (of layers, of the embedding table and the output head).

    For a pipeline they are those of the stage with most layers, and of the larger of table and head.

    Args:
        model: the model, padded for the mesh.
        mesh: the mesh, with dp of 1.
        is_tiled: whether arrays are padded to TPU tiles.
        virtual_stages: chunks of layers per stage of a lockstep pipeline, whose stages shard table and head and all
            hold the dense layers before the MoE layers; otherwise 0.
        without: paths of parameters to leave out.
    """
    layers, ends = 0, [0]
    for path, parameter in leaves(parameters(model)):
        if path in without:
            continue
        shape = local_parameter_shape(parameter, mesh=mesh, what=path)
        size = tiled_elements(shape) if is_tiled else math.prod(shape)
        if parameter.is_stacked and not (virtual_stages and "dense_layers" in parameter.axes):
            chunks = max(1, virtual_stages)
            layers += size // parameter.num_layers * chunks * chunk_slots(parameter.num_layers, mesh.pp, chunks)
        else:
            ends.append(size // mesh.pp if virtual_stages and "vocab" in parameter.axes else size)
    # In other pipelines the embedding table is on the first stage, the output head on the last.
    return layers, sum(ends) if mesh.pp == 1 or virtual_stages else max(ends)


def tiled_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements that an array occupies in a TPU's memory, where two of its dims fill whole tiles.

    The compiler chooses the two dims that need least padding (`tiled_dims`). If there are fewer than 8 rows, tiles are
    smaller.
    """
    if len(shape) < 2:
        return math.prod(shape)
    return _tiled(shape, *tiled_dims(shape))


def tiled_dims(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the two dims of an array that are the rows and the columns of tiles in a TPU's memory.

    They are those that need least padding (openxla.org/xla/tiled_layout; seen in the layouts of compiled steps).
    """
    return min(permutations(range(len(shape)), 2), key=lambda dims: _tiled(shape, *dims))


def _tiled(shape: tuple[int, ...], row: int, column: int) -> int:
    """Return the number of elements of an array with whole tiles. row, column: the dims of their rows and columns."""
    rows, columns = TILE
    others = math.prod(size for dim, size in enumerate(shape) if dim not in (row, column))
    return others * _filled(shape[row], min(rows, 1 << (shape[row] - 1).bit_length())) * _filled(shape[column], columns)


def _filled(dim: int, tile: int) -> int:
    """Return a dim rounded up to whole tiles."""
    return -(-dim // tile) * tile


@lru_cache(maxsize=1 << 12)
def factored_elements(model: Model, mesh: MeshShape, without: frozenset[str] = frozenset()) -> int:
    """Return the number of elements of Adafactor's state on one device (arXiv:1804.04235, section 3).

    The second moment of a parameter is factored into means over rows and over columns, or kept in full if its two
    largest dims are not both at least `FACTORED_FROM`. Optax has an array for each of these three moments; one that a
    parameter does not use has one element. without: paths of parameters without state.
    """
    count = 0
    for path, parameter in leaves(parameters(model)):
        if path in without:
            continue
        shape = local_parameter_shape(parameter, mesh=mesh, what=path)
        size = math.prod(shape)
        if factored := factored_dims(parameter.shape):
            count += sum(size // shape[dim] for dim in factored) + 1
        else:
            count += size + 2
    return count


@dataclass(frozen=True)
class States:
    """Bytes of parameters, moments and gradients on one device.

    Trained elements are the elements of trained parameters; frozen parameters have no gradients and no moments.
    is_tiled: whether arrays are padded to TPU tiles.
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy = DEFAULT
    is_tiled: bool = False

    @cached_property
    def stored(self) -> tuple[int, int]:
        """Trained parameter elements on one device if fsdp shards them: (of layers, of embedding table and head)."""
        return self._stored_on(without_copies(self.mesh), self.workload.frozen_paths)

    @property
    def elements(self) -> int:
        """The number of trained parameter elements on one device if fsdp shards them."""
        return sum(self.stored)

    @cached_property
    def kept(self) -> int:
        """Trained parameter elements that a device keeps between steps: a shard over fsdp from ZeRO-1 on, else all."""
        return sum(self._stored_on(self._kept_on, self.workload.frozen_paths))

    def _stored_on(self, mesh: MeshShape, without: frozenset[str]) -> tuple[int, int]:
        """Return the parameter elements on a device of a mesh with dp of 1: (of layers, of embedding table and head).

        without: paths of parameters to leave out.
        """
        virtual = self.strategy.virtual_stages if is_spmd_pipeline(self.mesh, self.strategy) else 0
        return stored_elements(self._model, mesh, is_tiled=self.is_tiled, virtual_stages=virtual, without=without)

    @property
    def frozen(self) -> float:
        """Bytes of the frozen parameters that one device keeps from step to step, quantised ones included."""
        return self._frozen_bytes(self._kept_on) + self.base

    def _frozen_bytes(self, mesh: MeshShape, without: frozenset[str] = frozenset()) -> float:
        """Return the bytes of the frozen parameters on one device of a mesh with dp of 1, each in its stored dtype.

        Quantised weights are not counted (`base`). without: paths of parameters to leave out.
        """
        workload, total = self.workload, 0.0
        if not workload.frozen_paths:
            return total
        declared = dict(leaves(parameters(workload.model)))
        for dtype in {workload.compute_dtype, workload.param_dtype}:
            others = (
                path for path, parameter in declared.items()
                if path not in workload.frozen_paths - without or workload.stored_dtype(path, parameter) != dtype
                or workload.base_format(path, parameter)
            )  # fmt: skip
            total += dtype_bytes(dtype) * sum(self._stored_on(mesh, frozenset(others)))
        return total

    @cached_property
    def base(self) -> float:
        """Bytes of the quantised weights on one device and of their scales: shards with ZeRO-3, else whole.

        They are never updated, so that ZeRO-1 and 2 neither shard nor gather them.
        """
        workload, total = self.workload, 0.0
        if workload.quantize_base is None:
            return total
        mesh = without_copies(self.mesh) if self.strategy.zero_stage == 3 else _without_shards(self.mesh)
        rules = {**RULES, "layers": ("pp",)}
        staged = staged_parameters(self._model, stages=mesh.pp, virtual_stages=self.strategy.virtual_stages)
        for path, parameter in leaves(staged):
            if (base := workload.base_format(path, parameter)) is not None:
                for array in stored_weight(parameter, base):
                    shape = local_parameter_shape(array.parameter, mesh=mesh, rules=rules, what=path)
                    size = tiled_elements(shape) if self.is_tiled else math.prod(shape)
                    total += dtype_bytes(array.dtype) * size
        return total

    @property
    def arguments(self) -> float:
        """Bytes of the training state that a step takes as arguments: parameters, float32 copies, moments, counters."""
        stored = self.kept * dtype_bytes(self.workload.param_dtype) + self.frozen
        return stored + self.master_weights + self.moments + 4 * COUNTERS[self.strategy.optimizer]

    @property
    def parameters(self) -> float:
        """Bytes of the parameters on one device during a step, frozen ones included.

        With ZeRO-3 they are shards over fsdp, with ZeRO-0 unsharded. With ZeRO-1 and 2 they are the shards, and
        unsharded copies in the compute dtype (in a lockstep pipeline, in the dtype of accumulated gradients); of
        quantised weights, unsharded arrays alone. With one microbatch and without pp the copy of a frozen embedding
        table is freed after its lookup.
        """
        degree, stage = self._shards, self.strategy.zero_stage
        frozen = self._frozen_bytes(without_copies(self.mesh))
        stored = self.elements * dtype_bytes(self.workload.param_dtype) + frozen
        if stage == 3 or degree == 1:
            return stored + self.base
        if stage == 0:
            return stored * degree + self.base
        narrow = dtype_bytes(self.workload.compute_dtype)
        whole = self._summed_in if is_spmd_pipeline(self.mesh, self.strategy) else narrow
        if self.strategy.num_microbatches == self.mesh.pp == 1 and not self.workload.model.tied_embeddings:
            tables = (op.name for op in program(self.workload.model).embedding if isinstance(op, Lookup))
            frozen = self._frozen_bytes(without_copies(self.mesh), without=frozenset(tables))
        return stored + (self.elements * whole + frozen) * degree + self.base

    @property
    def master_weights(self) -> float:
        """Bytes of the float32 copies that the optimizer updates; 0 if there are none."""
        if not self.strategy.master_weights or self.workload.param_dtype == "f32":
            return 0.0
        return 4.0 * self.kept

    @property
    def moments(self) -> float:
        """Bytes of the optimizer's moments on one device, with the scales of 8-bit moments; factored for Adafactor."""
        name, updated = self.strategy.optimizer, "f32" if self.strategy.master_weights else self.workload.param_dtype
        each = dtype_bytes(self.strategy.moment_dtype or updated)
        if name == "adafactor":
            return each * factored_elements(self._model, self._kept_on, self.workload.frozen_paths)
        if name == "adamw-8bit":
            each = 1 + 4 / BLOCK_OF_8BIT
        second = 0
        if name == "muon":
            second = sum(self._stored_on(self._kept_on, self.workload.frozen_paths.union(matrices(self.workload))))
        return each * (MOMENTS[name] * self.kept + second)

    @property
    def muon_working_bytes(self) -> float:
        """Bytes per device that Muon's update needs for the parameter that needs most; 0 for other optimizers.

        For each of its matrices on a device: the values before and after a Newton-Schulz iteration, and two products
        [s, s], where s is the matrix's shorter dim.
        """
        if self.strategy.optimizer != "muon":
            return 0.0
        each = dtype_bytes(self.workload.compute_dtype)
        most = 0.0
        for parameter, count in matrices_per_device(self.workload, self.mesh, self.strategy):
            short, long = short_and_long(parameter)
            most = max(most, each * count * (2 * short * long + 2 * short * short))
        return most

    def gradients(self, elements: float) -> float:
        """Return the bytes of gradients on one device, for parameters with `elements` elements in one shard over fsdp.

        Below ZeRO-2 gradients are unsharded, so a device has those of all shards. They have the parameters' dtype.
        Accumulated over microbatches, they have the dtype of gradient reduction, if that is wider
        (execution/training/gradients.py).
        """
        each = dtype_bytes(self.workload.param_dtype)
        if self.strategy.num_microbatches > 1 and (self.mesh.pp == 1 or self.strategy.zero_stage == 1):
            each = self._summed_in
        return each * elements * (1 if self.strategy.zero_stage >= 2 else self._shards)

    @property
    def held_gradients(self) -> float:
        """Bytes of gradients that a framework holds in the whole step, of unsharded parameters; 0 for XLA."""
        return self.strategy.profile.gradient_bytes * self.elements * self._shards

    @property
    def _model(self) -> Model:
        """The model with vocabulary and kv heads padded, so that the mesh divides them."""
        return padded(self.workload.model, self.mesh, rules_of(self.strategy))

    @property
    def _summed_in(self) -> float:
        """Bytes per element of gradients accumulated over microbatches."""
        dtypes = (self.workload.param_dtype, self.strategy.gradient_dtype or self.workload.param_dtype)
        return max(map(dtype_bytes, dtypes))

    @property
    def _shards(self) -> int:
        """The number of devices over which ZeRO shards each parameter."""
        return self.mesh.degree(RULES["embed"])

    @property
    def _kept_on(self) -> MeshShape:
        """The mesh with degree 1 on every axis that does not shard the state kept from step to step."""
        return without_copies(self.mesh) if self.strategy.zero_stage else _without_shards(self.mesh)


@lru_cache(maxsize=1 << 14)
def without_copies(mesh: MeshShape) -> MeshShape:
    """Return the mesh with dp of 1: the devices that hold one copy of the parameters."""
    return replace(mesh, dp=1)


@lru_cache(maxsize=1 << 12)
def _without_shards(mesh: MeshShape) -> MeshShape:
    """Return the mesh with degree 1 for dp and for the axes that ZeRO shards over."""
    return replace(mesh, dp=1, **dict.fromkeys(RULES["embed"], 1))
