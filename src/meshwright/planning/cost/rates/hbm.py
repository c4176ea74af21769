"""Lower bound of the bytes that a train step reads from and writes to one device's HBM."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.blocks import program
from meshwright.description.step.layer import alternating
from meshwright.description.step.passes.pipeline import EMBEDDING, LOGITS, stage_layers
from meshwright.description.step.strategy import STAGES_APART
from meshwright.description.step.train import train_step
from meshwright.description.step.workload import Remat, Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.activations import Activations
from meshwright.planning.cost.model_states import trained_elements

RECOMPUTED: Mapping[Remat, float] = {
    "none": 0.0,
    "attention": 0.0,
    "matmuls": 0.5,
    "alternate": 0.5,
    "named": 0.5,
    "block": 1.0,
    "offload": 1.0,
}
"""The approximate fraction of the forward pass's traffic that recomputation repeats, by remat policy."""


def hbm_bytes(workload: Workload, mesh: MeshShape) -> dict[str, float]:
    """Return the least bytes that each phase of a step moves between HBM and one device's cores.

    Forward reads gathered weights and writes saved activations; recompute does the same again; backward reads both, and
    writes gradients of both. The optimizer reads gradient, parameter and two moments, and writes the last three. With
    pp the figures are for a stage that does no work while it waits and has both embedding table and output head.
    """
    step, activations = train_step(workload, mesh, STAGES_APART), Activations(workload, mesh)
    local = step.extents.local_dims
    forward = activations.compute_bytes * Activations(workload, mesh, STAGES_APART).lookup_elements
    for name, region in step.ops.forward.items():
        weights = sum(local((*op.experts, *op.inner, *op.columns)) for op in region.matmuls)
        forward += activations.compute_bytes * weights * (1 if name in (EMBEDDING, LOGITS) else step.repeats[name].once)
    stacks = program(workload.model).stacks
    layers, kinds = stage_layers(sum(stack.num_layers for stack in stacks), mesh), alternating(stacks)[-1]
    read = sum(Activations(workload, mesh, stack=stack.name).read for stack in kinds) / len(kinds)
    forward += layers * read + activations.logits
    states = trained_elements(workload, mesh) * dtype_bytes(workload.param_dtype)
    recompute = RECOMPUTED[workload.remat] * forward
    return {"forward": forward, "recompute": recompute, "backward": 2 * forward, "update": 7 * states}
