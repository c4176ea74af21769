"""The rules of thumb that people choose meshes by, each with the numbers of a plan."""

from __future__ import annotations

from meshwright.cost import step_memory
from meshwright.mesh import MeshShape
from meshwright.planner.plan import Plan
from meshwright.units import show_bytes

MODEL_AXES = ("fsdp", "tp", "ep", "sp", "pp")
"""The axes that make a device hold less than the whole step."""

_SIZES = (
    (1, "it fits in one device: data parallelism is enough"),
    (8, "up to 8x wants one model axis"),
    (64, "8x to 64x wants two model axes"),
)
_BEYOND = "beyond 64x wants three model axes, a pipeline among them"


def rules_of_thumb(plan: Plan) -> list[str]:
    """What the rules of thumb say of a plan, a line each: the size of the model, fsdp first, enough sequences."""
    return [_size(plan), _fsdp_first(plan), _sequences(plan)]


def state_bytes(plan: Plan) -> int:
    """The bytes of parameters, gradients and moments of a whole model."""
    memory = step_memory(plan.workload, MeshShape(), plan.strategy)
    return sum(memory.get(name, 0) for name in ("parameters", "gradients", "optimizer"))


def _size(plan: Plan) -> str:
    """The model against the memory of a device, and the model axes that a plan has."""
    size, room = state_bytes(plan), plan.system.usable_bytes
    ratio = size / room
    advice = next((text for most, text in _SIZES if ratio <= most), _BEYOND)
    axes = [axis for axis in MODEL_AXES if plan.mesh.degree(axis) > 1]
    has = f"this plan has {', '.join(axes)}" if axes else "this plan has none"
    return f"states of {show_bytes(size)} are {ratio:.3g}x the {show_bytes(room)} of a device; {advice}; {has}"


def _fsdp_first(plan: Plan) -> str:
    """The share of the devices that fsdp takes, and what others take them for."""
    mesh = plan.mesh
    others = [f"{axis}={degree}" for axis, degree in mesh.degrees.items() if axis != "fsdp" and degree > 1]
    beside = f"; {', '.join(others)} beside it" if others else ""
    return f"largest fsdp first: here {mesh.fsdp:,} of {mesh.num_devices:,} devices{beside}"


def _sequences(plan: Plan) -> str:
    """The sequences of the batch beside the devices that share them out."""
    shards = plan.mesh.degree(("dp", "fsdp", "ep"))
    each = plan.workload.batch // shards
    names = "dp*fsdp*ep" if plan.mesh.ep > 1 else "dp*fsdp"
    return f"batch >= {names}: {plan.workload.batch:,} sequences on {shards:,}, {each:,} each"
