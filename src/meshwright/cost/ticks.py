"""How often a step runs its parts on one device: the layers of a stage, and what stands before and after all layers.

Stages of one program go through every tick together (`Strategy.lockstep`), on zeros where a schedule has nothing for
them: what is in a layer runs in all ticks of a pass, the lookup before them in all ticks too, the loss from the tick on
in which the first microbatch is through. With virtual stages lookup and loss are left out of the ticks that have none.
Plain layers before those of experts run with the lookup, and again for backward, on all stages: on a share of the
sequences each, or where these are too few on all of them (`workload.stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.pipeline import Schedule
from meshwright.mesh import MeshShape
from meshwright.workload import (
    RULES,
    Parameter,
    Strategy,
    Workload,
    batch_before_stages,
    chunk_slots,
    num_staged_layers,
)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """How often a pass of a step runs each layer of a stage, what is before the layers, and what is after them.

    layers: all slots of a stage together, empty ones too. ticks: how often stages hand on what they work on.
    """

    layers: int
    first: int
    last: int
    ticks: int


Counted = Callable[[int, MeshShape, Strategy], Runs]
"""A way to count runs: of so many layers, on a mesh, by a strategy."""


def is_lockstep(mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether a step has stages that go in lockstep."""
    return mesh.pp > 1 and strategy.lockstep


class Before(NamedTuple):
    """Layers that run with the lookup, as a step of them alone; where stages share it, on as many times dp."""

    workload: Workload
    mesh: MeshShape
    strategy: Strategy


@lru_cache(maxsize=1 << 12)
def before_stages(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Before | None:
    """The plain layers before those of experts, where stages go in lockstep; None where there are none.

    Backward makes them again from the tokens: one as far as it needs, several in a loop, each to its end.
    """
    model = workload.model
    if not is_lockstep(mesh, strategy) or model.experts is None or not model.num_dense_layers:
        return None
    plain = replace(model, experts=None, num_layers=model.num_dense_layers)
    again = replace(strategy, virtual_stages=1, reruns_blocks=plain.num_layers > 1)
    copies = mesh.pp if "pp" in batch_before_stages(workload.batch, mesh, strategy) else 1
    return Before(replace(workload, model=plain, remat="block"), replace(mesh, dp=mesh.dp * copies, pp=1), again)


def is_shared_before(workload: Workload, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether there are layers of `before_stages`, and each stage runs them for a share of the sequences."""
    before = before_stages(workload, mesh, strategy)
    return before is not None and before.mesh.dp > mesh.dp


@lru_cache(maxsize=1 << 12)
def of_stages(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Workload:
    """The workload without the layers of `before_stages`."""
    model = workload.model
    if before_stages(workload, mesh, strategy) is None or model.experts is None:
        return workload
    experts = replace(model.experts, num_dense_layers=0)
    return replace(workload, model=replace(model, experts=experts, num_layers=num_staged_layers(model)))


def runs_of(parameter: Parameter, mesh: MeshShape, strategy: Strategy, counted: Counted) -> Runs:
    """What a step runs of the layers of a parameter, and of what is outside of layers."""
    runs = counted(parameter.num_layers, mesh, strategy)
    return replace(runs, layers=parameter.num_layers * runs.first) if _is_before(parameter, mesh, strategy) else runs


def slots_of(parameter: Parameter, mesh: MeshShape, strategy: Strategy) -> int:
    """The layers of a parameter that a device has, empty slots too; 1 for what stands outside of layers."""
    if not parameter.is_stacked or _is_before(parameter, mesh, strategy):
        return parameter.num_layers
    return stage_slots(parameter.num_layers, mesh, strategy)


def batch_axes(parameter: Parameter, workload: Workload, mesh: MeshShape, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes that split the sequences of what a parameter multiplies, outermost first."""
    is_split = _is_before(parameter, mesh, strategy) and is_shared_before(workload, mesh, strategy)
    return ("pp", *RULES["batch"]) if is_split else RULES["batch"]


def _is_before(parameter: Parameter, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether a parameter is one of `before_stages`."""
    return "dense_layers" in parameter.axes and is_lockstep(mesh, strategy)


def vocab_axes(mesh: MeshShape, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes that split the vocab."""
    return ("pp", "tp") if is_lockstep(mesh, strategy) else ("tp",)


def schedule_of(mesh: MeshShape, strategy: Strategy) -> Schedule:
    """The schedule of a pipeline."""
    return Schedule(
        stages=mesh.pp,
        microbatches=strategy.num_microbatches,
        kind=strategy.schedule,
        virtual_stages=strategy.virtual_stages,
    )


def stage_slots(num_layers: int, mesh: MeshShape, strategy: Strategy) -> int:
    """The layers that a device runs for a microbatch: of the stage with most, or with empty slots beside its own."""
    virtual = strategy.virtual_stages if is_lockstep(mesh, strategy) else 1
    return virtual * chunk_slots(num_layers, mesh.pp, virtual)


def worked_runs(num_layers: int, mesh: MeshShape, strategy: Strategy) -> Runs:
    """What a step runs for its microbatches alone, which is what it takes time for outside of a pipeline's bubble."""
    parts = strategy.num_microbatches
    slots = stage_slots(num_layers, mesh, strategy)
    return Runs(layers=parts * slots, first=parts, last=parts, ticks=parts * strategy.virtual_stages)


def all_runs(num_layers: int, mesh: MeshShape, strategy: Strategy) -> Runs:
    """What a step runs in all, in the ticks of a bubble too."""
    worked = worked_runs(num_layers, mesh, strategy)
    if not is_lockstep(mesh, strategy):
        return worked
    ticks, virtual = schedule_of(mesh, strategy).ticks, strategy.virtual_stages
    slots = chunk_slots(num_layers, mesh.pp, virtual)
    return Runs(layers=ticks * slots, first=ticks if virtual == 1 else worked.first, last=worked.last, ticks=ticks)


def told_runs(num_layers: int, mesh: MeshShape, strategy: Strategy) -> Runs:
    """What the text of a program says that a step runs: branches that few ticks take stand in it as if all did."""
    runs = all_runs(num_layers, mesh, strategy)
    if not is_lockstep(mesh, strategy) or strategy.virtual_stages == 1:
        return runs
    schedule = schedule_of(mesh, strategy)
    return replace(runs, first=schedule.ticks, last=schedule.ticks - schedule.warm_up)


def kept_layers(num_layers: int, mesh: MeshShape, strategy: Strategy) -> int:
    """The layers of microbatches that a device in lockstep keeps something of for backward, at once.

    GPipe: those of all ticks. 1F1B: those of the microbatches in its slots, those of one on their way between stages
    that keep for each other, and those that it works on.
    """
    schedule = schedule_of(mesh, strategy)
    chunk = chunk_slots(num_layers, mesh.pp, strategy.virtual_stages)
    if schedule.kind == "gpipe":
        return chunk * schedule.ticks
    return chunk * (schedule.kept + schedule.is_balanced + 1)
