"""The rules of thumb that people choose meshes by, each with the numbers of a plan, as facts."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost import step_memory
from meshwright.mesh import MeshShape
from meshwright.planner.facts import FsdpFirst, RuleFact, SequencesPerDevice, StateSize
from meshwright.planner.plan import Plan

MODEL_AXES = ("fsdp", "tp", "ep", "sp", "pp")
"""The axes that make a device hold less than the whole step."""

_RATIOS = (1, 8, 64)
"""The states in memories of a device up to which no, one and two model axes are enough."""


def rules_of_thumb(plan: Plan) -> tuple[RuleFact, ...]:
    """What the rules of thumb say of a plan: the size of the model, fsdp first, enough sequences."""
    size, room, mesh = state_bytes(plan), plan.system.usable_bytes, plan.mesh
    axes = tuple(axis for axis in MODEL_AXES if mesh.degree(axis) > 1)
    batch_axes = ("dp", "fsdp", "ep") if mesh.ep > 1 else ("dp", "fsdp")
    return (
        StateSize(size, room, sum(size > ratio * room for ratio in _RATIOS), axes),  # pyright: ignore[reportArgumentType]
        FsdpFirst(mesh.fsdp, mesh.num_devices, replace(mesh, fsdp=1)),
        SequencesPerDevice(plan.workload.sequences, batch_axes, mesh.degree(batch_axes)),
    )


def state_bytes(plan: Plan) -> int:
    """The bytes of parameters, gradients and moments of a whole model."""
    memory = step_memory(plan.workload, MeshShape(), plan.strategy)
    return sum(memory.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
