"""Changes that make a step fit in memory, with their cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_mesh
from meshwright.description.step.rules import RULES, stream_rules
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import REMATS, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape, divisors
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.prediction import predict

MOST_CHANGES = 3
"""Maximum number of changes combined."""

WORTH_IT = 0.98
"""If single changes suffice, a pair is listed only if its step takes less than this fraction of their shortest step."""


@dataclass(frozen=True)
class Change:
    """A new value for one option of `meshwright plan`; for the option `mesh`, the value is a MeshShape."""

    option: str
    value: str | int | MeshShape

    @property
    def flag(self) -> str:
        """The change as a command-line argument."""
        return f"--{self.option.replace('_', '-')} {self.value}"

    def applied(self, step: _Step) -> _Step:
        """Return the step with this change."""
        if isinstance(self.value, MeshShape):
            return replace(step, mesh=self.value)
        if self.option in WORKLOAD_FIELDS:
            return replace(step, workload=replace(step.workload, **{self.option: self.value}))
        return replace(step, strategy=replace(step.strategy, **{self.option: self.value}))

    def __str__(self) -> str:
        match self.option, self.value:
            case "remat", "offload":
                return "keep the inputs of layers in the host's memory"
            case "num_microbatches", count:
                return f"{count} microbatches"
            case "zero_stage", stage:
                return f"ZeRO stage {stage}"
            case "optimizer", _:
                return "moments in 8 bits"
            case "param_dtype", _:
                return "parameters and moments in bf16"
            case "attention", _:
                return "a fused attention kernel"
            case _:
                return f"{self.option} {self.value}"


WORKLOAD_FIELDS = ("remat", "param_dtype")
"""Changed options that belong to the workload; all others but `mesh` belong to the strategy."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Changes that make a step fit in memory, and their cost.

    workload, mesh, strategy: those of the changed step. peak_bytes: its peak memory per device. extra_seconds: its step
    time minus the original's; negative if it is faster.
    """

    changes: tuple[Change, ...]
    workload: Workload
    mesh: MeshShape
    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    extra_seconds: float


def lacking_bytes(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> int:
    """Return the bytes per device by which a step's peak exceeds the memory; 0 if the step fits."""
    return max(0, int(step_memory(workload, mesh, strategy, kind=system.chip.kind)["peak"] - system.plannable_bytes))


def ways_to_fit(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> tuple[Fix, ...]:
    """Return the changes that make a step fit in memory, fastest first; () if it fits already, or if nothing helps.

    For each kind of change (another remat policy, another mesh, …) or combination of kinds, the fastest is returned. As
    few changes as possible are combined, at most `MOST_CHANGES`; if single changes suffice, pairs are added if they are
    clearly faster (`WORTH_IT`).
    """
    start = _Step(workload, mesh, strategy)
    if start.fits(system):
        return ()
    # The remat policies that save less than the current one.
    remats = [Change("remat", remat) for remat in REMATS[REMATS.index(workload.remat) + 1 :]]
    kinds = [list(kind) for kind in (remats, _meshes(start, system), *_strategies(start)) if kind]
    before = predict(workload, mesh, system, strategy).step_seconds or 0.0
    found: list[Fix] = []
    for count in range(1, MOST_CHANGES + 1):
        if found and count > 2:
            break
        best = WORTH_IT * min((fix.step_seconds for fix in found), default=math.inf)
        fixes = (_fastest(start, some, system, before) for some in combinations(kinds, count))
        found += [fix for fix in fixes if fix and fix.step_seconds < best]
    return tuple(sorted(found, key=lambda fix: fix.step_seconds))


@dataclass(frozen=True)
class _Step:
    """A train step: workload, mesh and strategy."""

    workload: Workload
    mesh: MeshShape
    strategy: Strategy

    def fits(self, system: System) -> bool:
        """Whether the step fits in the memory of a device."""
        return lacking_bytes(self.workload, self.mesh, system, self.strategy) == 0


def _fastest(start: _Step, kinds: tuple[list[Change], ...], system: System, before: float) -> Fix | None:
    """Return the fastest combination of changes, one from each list in `kinds`, with which a step fits; else None.

    before: seconds of the original step.
    """
    fixes: list[Fix] = []
    for changes in product(*kinds):
        step = start
        for change in changes:
            step = change.applied(step)
        if _is_legal(step) and step.fits(system):
            record = predict(step.workload, step.mesh, system, step.strategy)
            seconds = record.step_seconds or 0.0
            fixes.append(
                Fix(
                    changes=changes,
                    workload=step.workload,
                    mesh=step.mesh,
                    strategy=step.strategy,
                    peak_bytes=record.memory_bytes["peak"],
                    step_seconds=seconds,
                    extra_seconds=seconds - before,
                )
            )
    return min(fixes, key=lambda fix: fix.step_seconds, default=None)


def _is_legal(step: _Step) -> bool:
    local = step.workload.batch // step.mesh.degree(RULES["batch"])
    if local % step.strategy.num_microbatches:
        return False
    try:
        check_mesh(step.workload, step.mesh, stream_rules(step.strategy.tp_stream))
    except MeshwrightError:
        return False
    return True


def _meshes(step: _Step, system: System) -> Iterator[Change]:
    """Yield changes to meshes in which a factor of one axis's degree is moved to fsdp, tp or sp."""
    mesh = step.mesh
    for giver in AXES:
        for taker in ("fsdp", "tp", "sp"):
            if taker == giver:
                continue
            for part in divisors(mesh.degrees[giver])[1:]:
                degrees = {giver: mesh.degrees[giver] // part, taker: mesh.degrees[taker] * part}
                other = replace(mesh, **degrees)
                if system.chip.levels and other.tp > max(mesh.tp, system.chip.levels[0].degree):
                    continue
                yield Change("mesh", other)


def _strategies(step: _Step) -> Iterator[list[Change]]:
    """Yield, for each option but remat and mesh, the list of its possible changes."""
    now, local = step.strategy, step.workload.batch // step.mesh.degree(RULES["batch"])
    yield [Change("num_microbatches", parts) for parts in divisors(local) if parts > now.num_microbatches]
    yield [Change("zero_stage", stage) for stage in range(now.zero_stage + 1, 4) if step.mesh.fsdp > 1]
    yield [Change("optimizer", "adamw-8bit")] * (now.optimizer == "adamw")
    yield [Change("param_dtype", "bf16")] * (step.workload.param_dtype == "f32")
    yield [Change("attention", "flash")] * (now.attention == "scores")
