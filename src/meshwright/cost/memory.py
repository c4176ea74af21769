"""The bytes a train step holds on one device at its fullest moment, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.traffic import stage_layers
from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.workload import (
    DEFAULT,
    IN_USE,
    RULES,
    ModelConfig,
    Parameter,
    Strategy,
    Workload,
    leaves,
    local_parameter_shape,
    num_query_chunks,
    parameters,
    token_axes,
    used_shape,
)

MOMENT_BYTES: Mapping[str, float | None] = {
    "adamw": None,
    "adamw-8bit": 2.0,
    "lion": None,
    "adafactor": 0.0,
    "sgd": 0.0,
}
"""The bytes of an optimizer's moments a parameter; None where they are of the parameter's dtype.

adamw two, lion one of them (arXiv:2302.06675); 8-bit AdamW a byte each (arXiv:2110.02861); adafactor's row and column
sums (arXiv:1804.04235) vanish beside the parameters.
"""


def step_memory(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> dict[str, int]:
    """Bytes per device by name, as they are live at the fullest moment, and their sum, `peak`.

    That moment is the loss, where the logits are, or the backward pass of a layer, where what it did not keep is made
    again: the terms of the other one are left out. Of a pipeline it is the stage with most layers and most microbatches
    in flight.
    """
    sizes = _Sizes(workload, mesh, strategy)
    layers = stage_layers(workload.model.num_layers, mesh) * in_flight(mesh, strategy)
    always = {
        "parameters": sizes.parameters,
        "optimizer": sizes.optimizer,
        "batch": 2 * 4 * sizes.tokens * strategy.num_microbatches,
        "activations": layers * sizes.saved_layer,
    }
    # Gradients of several microbatches are summed, so that they outlive each backward pass.
    summed = {"gradients": sizes.gradients} if strategy.num_microbatches > 1 else {}
    loss = summed | {"logits": sizes.logits, "gathered": sizes.gathered("unembedding")}
    layer = {"gradients": sizes.gradients, "working": sizes.working, "gathered": sizes.gathered("layers.")}
    fullest = max(loss, layer, key=lambda terms: sum(terms.values()))
    terms = {name: int(size) for name, size in (always | fullest).items()}
    return terms | {"peak": sum(terms.values())}


def argument_bytes(workload: Workload, mesh: MeshShape) -> int:
    """The bytes of a step's arguments on one device: parameters, moments and their two counters, and the batch."""
    memory = step_memory(workload, mesh)
    return memory["parameters"] + memory["optimizer"] + memory["batch"] + 2 * 4


def in_flight(mesh: MeshShape, strategy: Strategy) -> float:
    """The microbatches whose activations the fullest stage of a pipeline holds at once; 1 without a pipeline.

    All of them in GPipe, as many as there are stages in 1F1B, a little more interleaved: 1 + (p - 1) / (p v) times
    (arXiv:2205.05198, appendix B).
    """
    if mesh.pp == 1:
        return 1
    if strategy.schedule == "gpipe":
        return strategy.num_microbatches
    more = 1 + (mesh.pp - 1) / (mesh.pp * strategy.virtual_stages) if strategy.virtual_stages > 1 else 1
    return min(mesh.pp * more, strategy.num_microbatches)


def parameter_elements(workload: Workload, mesh: MeshShape) -> int:
    """The elements of all parameters that one device stores; of a pipeline the stage with most."""
    return _elements(workload.model, replace(mesh, dp=1))


@lru_cache(maxsize=1 << 14)
def _elements(model: ModelConfig, mesh: MeshShape) -> int:
    """The elements of a stage on a mesh whose dp, which stores copies, is left out."""
    layers, ends = 0, []
    for path, parameter in leaves(parameters(model)):
        size = math.prod(local_parameter_shape(parameter, mesh=mesh, what=path))
        if "layers" in parameter.axes:
            layers += size // parameter.num_layers * stage_layers(parameter.num_layers, mesh)
        else:
            ends.append(size)
    # The table stands on the first stage, that of the logits on the last.
    return layers + (sum(ends) if mesh.pp == 1 else max(ends))


@lru_cache(maxsize=1 << 12)
def _gathered_elements(model: ModelConfig, mesh: MeshShape, prefix: str) -> float:
    """The elements of the gathered weights of one layer, or of the table of the logits."""
    return sum(
        math.prod(used_shape(parameter, mesh, path)) / parameter.num_layers
        for path, parameter in leaves(parameters(model))
        if path.startswith(prefix) and _is_gathered(parameter)
    )


@dataclass(frozen=True)
class _Sizes:
    """The bytes of each kind of array on one device; activations are those of one microbatch."""

    workload: Workload
    mesh: MeshShape
    strategy: Strategy = DEFAULT

    @property
    def _stored(self) -> float:
        """The bytes of the parameters where fsdp shards them."""
        return parameter_elements(self.workload, self.mesh) * dtype_bytes(self.workload.param_dtype)

    @property
    def parameters(self) -> float:
        """The parameters; below ZeRO-3 whole, in the compute dtype beside shards of the dtype they are kept in."""
        degree, stage = self.mesh.fsdp, self.strategy.zero_stage
        if stage == 3 or degree == 1:
            return self._stored
        if stage == 0:
            return self._stored * degree
        narrow = dtype_bytes(self.workload.compute_dtype) / dtype_bytes(self.workload.param_dtype)
        return self._stored * (1 + narrow * degree)

    @property
    def gradients(self) -> float:
        """The gradients, in the parameters' dtype."""
        return self._stored * (1 if self.strategy.zero_stage >= 2 else self.mesh.fsdp)

    @property
    def optimizer(self) -> float:
        """The optimizer's moments."""
        each, name = dtype_bytes(self.workload.param_dtype), self.strategy.optimizer
        moments = MOMENT_BYTES[name]
        size = moments if moments is not None else each * (2 if name == "adamw" else 1)
        return self._stored * size / each * (1 if self.strategy.zero_stage else self.mesh.fsdp)

    @property
    def tokens(self) -> int:
        """The tokens of one microbatch on one device."""
        return self.workload.tokens // self.mesh.degree(token_axes()) // self.strategy.num_microbatches

    @property
    def saved_layer(self) -> int:
        """What one layer keeps for backward under the workload's remat policy."""
        if self.workload.remat == "none":
            return self.read_layer
        if self.workload.remat == "block":
            return int(self._narrow * self._stream)
        return int(self._narrow * (2 * self._stream + self._heads + self._mlp))

    @property
    def read_layer(self) -> int:
        """All that one layer's backward reads, the gathered weights apart.

        The stream before each of its two blocks, and their gathered inputs; queries, keys and values before and after
        rotation; float32 scores of one chunk of queries; the mlp's two products and their own.
        """
        narrow = 2 * self._stream + 2 * self._inputs + 2 * self._heads + 3 * self._mlp / 2
        return int(self._narrow * narrow + 4 * self._scores)

    @property
    def working(self) -> float:
        """What a layer's backward pass has live beside what was kept: all it reads, the softmax, and its gradient."""
        return self.read_layer - self.saved_layer + (4 + self._narrow) * self._scores

    @property
    def logits(self) -> float:
        """The float32 logits, and their gradient as the product that follows takes it."""
        return (4 + self._narrow) * self.tokens * self.workload.model.vocab / self.mesh.tp

    def gathered(self, prefix: str) -> float:
        """The gathered weights of one layer, or of the table of the logits; none where parameters are kept whole."""
        if self.strategy.zero_stage < 3 and self.mesh.sp == 1:
            return 0.0
        # Once gathered, a weight is split over tp and ep alone.
        used_mesh = MeshShape(tp=self.mesh.tp, ep=self.mesh.ep)
        return self._narrow * _gathered_elements(self.workload.model, used_mesh, prefix)

    @property
    def _narrow(self) -> float:
        """The bytes of an element as products have it."""
        return dtype_bytes(self.workload.compute_dtype)

    @property
    def _inputs(self) -> float:
        """The elements of a block's gathered input."""
        return self.tokens * self.workload.model.embed

    @property
    def _stream(self) -> float:
        """The elements of the residual stream between blocks."""
        return self._inputs / (self.mesh.tp if self.strategy.sequence_parallel else 1)

    @property
    def _heads(self) -> float:
        """The elements of queries, keys and values."""
        model = self.workload.model
        each = (model.num_heads + model.num_kv_heads) * model.query_key_dim + model.num_kv_heads * model.value_dim
        return self.tokens * each / self.mesh.tp

    @property
    def _mlp(self) -> float:
        """The elements of the products that the mlp begins with, of experts those that work on a token."""
        model, experts = self.workload.model, self.workload.model.experts
        width = experts.num_active * experts.mlp + experts.shared_mlp if experts else model.mlp
        return self.tokens * (2 if model.gated else 4 / 3) * width / self.mesh.tp

    @property
    def _scores(self) -> float:
        """The elements of the attention scores of one chunk of queries; a fused kernel makes none."""
        if self.strategy.attention == "flash":
            return 0.0
        queries = self.tokens / num_query_chunks(self.workload.seq_len)
        return queries * self.workload.model.num_heads / self.mesh.tp * self.workload.seq_len


def step_traffic(workload: Workload, mesh: MeshShape) -> dict[str, float]:
    """The bytes that each phase of a step moves between HBM and one device's cores, at least.

    Forward reads the gathered weights and writes what a layer's backward reads; recomputing does the same once more;
    backward reads both, and writes gradients of both. The update reads gradient, parameter and two moments, and writes
    the last three.
    """
    sizes, layers = _Sizes(workload, mesh), stage_layers(workload.model.num_layers, mesh)
    weights = sum(sizes.gathered(prefix) for prefix in ("embedding", "unembedding"))
    weights += layers * sizes.gathered("layers.")
    activations = layers * sizes.read_layer + sizes.logits
    states = parameter_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    again = {"none": 0.0, "matmuls": 0.5, "block": 1.0}[workload.remat]
    forward = weights + activations
    return {"forward": forward, "recompute": again * forward, "backward": 2 * forward, "update": 7 * states}


def _is_gathered(parameter: Parameter) -> bool:
    """Whether a parameter is stored in shards that its use gathers; norms and biases are kept whole."""
    return "norm" not in parameter.axes and any(name in IN_USE and RULES[name] for name in parameter.axes)
