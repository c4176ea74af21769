"""The bytes a train step moves between HBM and a device's cores."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.activations import Activations
from meshwright.cost.model_states import gathered_elements, parameter_elements
from meshwright.step.pipeline import stage_layers
from meshwright.hardware import dtype_bytes
from meshwright.mesh import MeshShape
from meshwright.workload import Remat, Workload

AGAIN: Mapping[Remat, float] = {
    "none": 0.0,
    "attention": 0.0,
    "matmuls": 0.5,
    "alternate": 0.5,
    "block": 1.0,
    "offload": 1.0,
}
"""The share of the forward pass's traffic that backward repeats, about."""


def step_traffic(workload: Workload, mesh: MeshShape) -> dict[str, float]:
    """The bytes that each phase of a step moves between HBM and one device's cores, at least.

    Forward reads the gathered weights and writes what a layer's backward reads; recomputing does the same once more;
    backward reads both, and writes gradients of both. The update reads gradient, parameter and two moments, and writes
    the last three.
    """
    activations, layers = Activations(workload, mesh), stage_layers(workload.model.num_layers, mesh)
    ends = gathered_elements(workload.model, mesh.tp, mesh.ep, ("embedding", "unembedding"))
    weights = activations.narrow * (ends + layers * gathered_elements(workload.model, mesh.tp, mesh.ep, ()))
    states = parameter_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    forward = weights + layers * activations.read + activations.logits
    again = AGAIN[workload.remat]
    return {"forward": forward, "recompute": again * forward, "backward": 2 * forward, "update": 7 * states}
