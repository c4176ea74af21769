"""What to do about a step that does not fit in memory: by how much it does not, and the changes that make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

from meshwright.cost import step_memory
from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import AXES, MeshShape, divisors
from meshwright.planner.prediction import predict
from meshwright.workload import DEFAULT, REMATS, Strategy, Workload, check_mesh

MOST_CHANGES = 3
"""The changes made at once where fewer do not help."""

WORTH_IT = 0.98
"""Two changes are told beside one that helps alone where they take less than this share of its time."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Changes that make a step fit, and what they cost.

    changes: each in words. flags: the same as arguments of `meshwright plan`. workload, mesh, strategy: the step with
    them. peak_bytes: per device. step_seconds: as predicted; extra_seconds: beyond the step as it was, which would
    need more memory than there is; negative where the change is faster too.
    """

    changes: tuple[str, ...]
    flags: tuple[str, ...]
    workload: Workload
    mesh: MeshShape
    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    extra_seconds: float


def lacking_bytes(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> int:
    """The bytes by which a step exceeds the memory of a device; 0 where it fits."""
    return max(0, int(step_memory(workload, mesh, strategy, kind=system.chip.kind)["peak"] - system.usable_bytes))


def ways_to_fit(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy = DEFAULT) -> tuple[Fix, ...]:
    """The changes that make a step fit, fastest first; of each kind of change, or set of kinds, the fastest one.

    As few changes at once as help, up to `MOST_CHANGES`; of two where one helps, only those that are clearly faster
    (`WORTH_IT`). Empty where the step fits as it is, and where nothing helps.
    """
    start = _Step(workload, mesh, strategy)
    if start.fits(system):
        return ()
    kinds = [list(kind) for kind in (_remats(start), _meshes(start, system), *_strategies(start)) if kind]
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
    """A step and how it is run."""

    workload: Workload
    mesh: MeshShape
    strategy: Strategy

    def fits(self, system: System) -> bool:
        """Whether it fits in the memory of a device."""
        return lacking_bytes(self.workload, self.mesh, system, self.strategy) == 0


@dataclass(frozen=True, kw_only=True)
class _Change:
    """One change: in words, as arguments, and as the fields it sets."""

    words: str
    flags: str
    mesh: MeshShape | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)

    def made(self, step: _Step) -> _Step:
        """The step with this change."""
        workload = replace(step.workload, **self.workload)
        return _Step(workload, self.mesh or step.mesh, replace(step.strategy, **self.strategy))


def _fastest(start: _Step, kinds: tuple[list[_Change], ...], system: System, before: float) -> Fix | None:
    """The fastest step that fits with one change of each kind; None where none does."""
    fixes = []
    for changes in product(*kinds):
        step = start
        for change in changes:
            step = change.made(step)
        if _is_legal(step) and step.fits(system):
            fixes.append(_fix(step, changes, system, before))
    return min(fixes, key=lambda fix: fix.step_seconds, default=None)


def _fix(step: _Step, changes: tuple[_Change, ...], system: System, before: float) -> Fix:
    """The changes with their cost."""
    record = predict(step.workload, step.mesh, system, step.strategy)
    seconds = record.step_seconds or 0.0
    return Fix(
        changes=tuple(change.words for change in changes),
        flags=tuple(change.flags for change in changes),
        workload=step.workload,
        mesh=step.mesh,
        strategy=step.strategy,
        peak_bytes=record.memory_bytes["peak"],
        step_seconds=seconds,
        extra_seconds=seconds - before,
    )


def _is_legal(step: _Step) -> bool:
    """Whether the mesh can split the workload, and each device's sequences the microbatches."""
    local = step.workload.batch // step.mesh.degree(("dp", "fsdp", "ep"))
    if local % step.strategy.num_microbatches:
        return False
    try:
        check_mesh(step.workload, step.mesh)
    except MeshwrightError:
        return False
    return True


def _remats(step: _Step) -> Iterator[_Change]:
    """The policies that keep less than the step's own."""
    for remat in REMATS[REMATS.index(step.workload.remat) + 1 :]:
        what = "keep the inputs of layers in the host's memory" if remat == "offload" else f"remat {remat}"
        yield _Change(words=what, flags=f"--remat {remat}", workload={"remat": remat})


def _meshes(step: _Step, system: System) -> Iterator[_Change]:
    """The meshes that an axis which keeps copies, or splits less, makes by giving its devices to fsdp or tp."""
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
                yield _Change(words=f"mesh {other}", flags=f"--mesh {other}", mesh=other)


def _strategies(step: _Step) -> Iterator[list[_Change]]:
    """What a strategy can change, each kind a list."""
    now, local = step.strategy, step.workload.batch // step.mesh.degree(("dp", "fsdp", "ep"))
    yield [
        _Change(
            words=f"{parts} microbatches",
            flags=f"--num-microbatches {parts}",
            strategy={"num_microbatches": parts},
        )
        for parts in divisors(local)
        if parts > now.num_microbatches
    ]
    yield [
        _Change(words=f"ZeRO stage {stage}", flags=f"--zero-stage {stage}", strategy={"zero_stage": stage})
        for stage in range(now.zero_stage + 1, 4)
        if step.mesh.fsdp > 1
    ]
    yield [_Change(words="moments in 8 bits", flags="--optimizer adamw-8bit", strategy={"optimizer": "adamw-8bit"})] * (
        now.optimizer == "adamw"
    )
    yield [
        _Change(words="parameters and moments in bf16", flags="--param-dtype bf16", workload={"param_dtype": "bf16"})
    ] * (step.workload.param_dtype == "f32")
    yield [_Change(words="a fused attention kernel", flags="--attention flash", strategy={"attention": "flash"})] * (
        now.attention == "scores"
    )
