"""The flops of a train step: those the model needs, and those a device executes, recomputation included.

Only products count, 2 flops for a multiply and an add: norms, rotary embedding, softmax and the optimizer are under a
percent of them at real widths. Attention is counted full, not causal: the scores behind the mask are computed too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.mesh import MeshShape
from meshwright.workload import (
    ModelConfig,
    Parameter,
    Workload,
    active_share,
    leaves,
    num_query_chunks,
    parameters,
    token_axes,
    used_shape,
)


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The flops of one step on one device, by phase."""

    forward: float
    recompute: float
    backward: float

    @property
    def total(self) -> float:
        """All that is executed."""
        return self.forward + self.recompute + self.backward


NEVER_RECOMPUTED = ("down", "expert_down", "shared_down", "unembedding", "embedding")
"""Weights whose product backward never needs again: nothing behind it in its block, or no block at all."""


def model_flops(workload: Workload) -> float:
    """The flops that a step of the model needs over all devices, nothing recomputed: what MFU counts.

    6 for each weight that multiplies and each token, and 12 layers x heads x head_dim x seq_len a token for attention
    scores (PaLM, arXiv:2204.02311, appendix B).
    """
    weights = sum(size for _, size in _weights(workload.model, MeshShape()))
    return 3 * workload.tokens * (2 * weights + _score_flops(workload))


def step_flops(workload: Workload, mesh: MeshShape) -> StepFlops:
    """The flops that one device executes in a step; over pp, the mean of its stages."""
    tokens = workload.tokens / mesh.degree(token_axes())
    # An unused embedding table has no product; each device multiplies by its own part of a weight.
    products = {path: 2 * tokens * size / mesh.pp for path, size in _weights(workload.model, mesh)}
    scores = tokens * _score_flops(workload) / (mesh.tp * mesh.pp)
    again = {"none": 0.0, "matmuls": scores, "block": scores}[workload.remat]
    if workload.remat == "block":
        again += sum(flops for path, flops in products.items() if path.rpartition(".")[2] not in NEVER_RECOMPUTED)
    if num_query_chunks(workload.seq_len) > 1:
        again += scores / 2  # Each chunk makes its scores, half of attention's products, once more.
    forward = sum(products.values()) + scores
    return StepFlops(forward=forward, recompute=again, backward=2 * forward)


def _weights(model: ModelConfig, mesh: MeshShape) -> list[tuple[str, float]]:
    """Each weight that multiplies activations, and the elements of it that one device multiplies a token by."""
    return [
        (
            path,
            math.prod(used_shape(parameter, mesh, path))
            * active_share(parameter, model)
            * _experts_degree(parameter, mesh),
        )
        for path, parameter in leaves(parameters(model))
        if parameter.role == "product"
    ]


def _experts_degree(parameter: Parameter, mesh: MeshShape) -> int:
    """The devices whose tokens come to the experts of one."""
    return mesh.ep if "expert" in parameter.axes else 1


def _score_flops(workload: Workload) -> float:
    """The flops of attention scores and their product with the values, a token, forward, over all layers."""
    model = workload.model
    return 2 * model.num_layers * model.num_heads * (model.query_key_dim + model.value_dim) * workload.seq_len
