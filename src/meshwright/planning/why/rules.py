"""Rules of thumb for choosing a mesh, as facts with the numbers of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.plan import Plan
from meshwright.planning.why.fact import Fact
from meshwright.units import show_bytes, show_count

ADVICE = (
    "it fits in one device: data parallelism is enough",
    "up to 8x needs one model axis",
    "8x to 64x needs two model axes",
    "above 64x needs three model axes, a pipeline among them",
)
"""Advice by the number of model axes that the rule of thumb recommends."""


MODEL_AXES = ("fsdp", "tp", "ep", "sp", "pp")
"""Mesh axes that reduce the training state on a device."""


_RATIOS = (1, 8, 64)
"""Size of the training state, as a multiple of a device's memory, up to which 0, 1 and 2 model axes suffice."""


@dataclass(frozen=True)
class StateSize(Fact):
    """Parameters, gradients and moments of the whole model, compared with the memory of a device."""

    state_bytes: int
    usable_bytes: float
    wanted_axes: Literal[0, 1, 2, 3]
    """Number of model axes that the rule of thumb recommends; 3 includes a pipeline."""
    axes: tuple[str, ...]
    """Model axes that the plan has."""

    @property
    def ratio(self) -> float:
        """Size of the state as a multiple of a device's memory."""
        return self.state_bytes / self.usable_bytes

    def __str__(self) -> str:
        has = f"this plan has {', '.join(self.axes)}" if self.axes else "this plan has none"
        sizes = f"states of {show_bytes(self.state_bytes)} are {self.ratio:.3g}x the {show_bytes(self.usable_bytes)}"
        return f"{sizes} of a device; {ADVICE[self.wanted_axes]}; {has}"


@dataclass(frozen=True)
class FsdpFirst(Fact):
    """The degree of fsdp, the number of devices, and the mesh without fsdp."""

    fsdp: int
    num_devices: int
    others: MeshShape

    def __str__(self) -> str:
        beside = f"; {str(self.others).replace(',', ', ')} beside it" if self.others.num_devices > 1 else ""
        return f"largest fsdp first: here {self.fsdp:,} of {show_count(self.num_devices, 'device')}{beside}"


@dataclass(frozen=True)
class SequencesPerDevice(Fact):
    """Sequences of the batch, the mesh axes that split them, and the number of devices along these axes."""

    batch: int
    axes: tuple[str, ...]
    shards: int

    @property
    def each(self) -> int:
        """Sequences per device."""
        return self.batch // self.shards

    def __str__(self) -> str:
        batch = show_count(self.batch, "sequence")
        return f"batch >= {'*'.join(self.axes)}: {batch} on {self.shards:,}, {self.each:,} each"


RuleFact = StateSize | FsdpFirst | SequencesPerDevice


def rules_of_thumb(plan: Plan) -> tuple[RuleFact, ...]:
    """Return the rules of thumb for a plan: model size, fsdp first, enough sequences."""
    size, room, mesh = state_bytes(plan), plan.system.usable_bytes, plan.mesh
    axes = tuple(axis for axis in MODEL_AXES if mesh.degree(axis) > 1)
    batch_axes = ("dp", "fsdp", "ep") if mesh.ep > 1 else ("dp", "fsdp")
    return (
        StateSize(size, room, sum(size > ratio * room for ratio in _RATIOS), axes),  # pyright: ignore[reportArgumentType]
        FsdpFirst(mesh.fsdp, mesh.num_devices, replace(mesh, fsdp=1)),
        SequencesPerDevice(plan.workload.sequences, batch_axes, mesh.degree(batch_axes)),
    )


def state_bytes(plan: Plan) -> int:
    """Return the bytes of parameters, gradients and moments of the whole model, on one device without sharding."""
    memory = step_memory(plan.workload, MeshShape(), plan.strategy)
    return sum(memory.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
