"""Best-first search for the fastest meshes and strategies of a workload on a system.

Lower bounds of the step time make it unnecessary to predict every configuration.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_mesh, check_runnable
from meshwright.description.step.rules import token_axes
from meshwright.description.step.stages import check_stage_remat
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Remat, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import peak_within, step_memory
from meshwright.planning.overlap import NO_COMMUNICATION, least_communication, least_weight_communication
from meshwright.planning.plan import Plan, predicted_plan
from meshwright.planning.prediction import step_bound_seconds, step_seconds
from meshwright.planning.space import Candidate, Space, runnable_space, whole_space
from meshwright.planning.ties import ties

_BELOW = 1 - 1e-9
"""Factor on lower bounds, so that rounding never makes a bound larger than the time that it bounds."""


@dataclass(frozen=True)
class Ranking:
    """The best plan of each of the best meshes.

    Attributes:
        plans: first those that fit in memory, fastest first; then the others, least memory first.
        num_meshes: the number of legal meshes.
        num_candidates: the number of configurations (mesh, remat policy, strategy) of all legal meshes.
        num_priced: how many of these had their step time predicted; lower bounds rule out the others.
        num_tied: how many of the first plans tie within the prediction's error; they are sorted simplest first
            (`planning.ties`).
    """

    plans: tuple[Plan, ...]
    num_meshes: int
    num_candidates: int
    num_priced: int
    num_tied: int = 1


def rank(
    workload: Workload,
    system: System,
    *,
    remats: tuple[Remat, ...] = (),
    top: int = 8,
    is_runnable: bool = False,
    **choices: Any,
) -> Ranking:
    """Return the best `top` meshes, each with its best strategy. Raises if no mesh is legal.

    remats: remat policies to choose from; all by default. is_runnable: search only strategies that `meshwright train`
    can run. choices: values of strategy fields that are not searched (`whole_space`).
    """
    space = runnable_space if is_runnable else whole_space
    return rank_space(space(workload, system, remats, **choices), top=top)


def find_best(workload: Workload, system: System, *, remats: tuple[Remat, ...] = (), **choices: Any) -> Plan:
    """Return the fastest plan that fits; if none fits, the plan that needs least memory."""
    return rank(workload, system, remats=remats, top=1, **choices).plans[0]


def find_faster(
    workload: Workload, system: System, seconds: float, *, remats: tuple[Remat, ...] = (), **choices: Any
) -> Plan | None:
    """Return the fastest plan that fits, if its step takes less than `seconds`; else None.

    Configurations whose lower bound is not below `seconds` are not predicted.
    """
    space = whole_space(workload, system, remats, **choices)
    with _without_collector():
        found = next(_Search(space, seconds).plans(tuple(filter(space.parts, space.meshes()))), None)
    # The prediction adds its terms in another order than the search, so rounding may differ.
    return found if found and (found.predicted.step_seconds or 0.0) < seconds else None


def plan_stages(workload: Workload, mesh: MeshShape, system: System) -> Plan:
    """Return the best plan of a mesh with pipeline stages that `meshwright train` can run.

    The search chooses schedule, microbatches and virtual stages. Raises if the workload cannot run over these stages.
    """
    check_mesh(workload, mesh)
    check_runnable(workload.model, mesh)
    check_stage_remat(workload.remat, mesh, replace(DEFAULT, schedule="gpipe"))
    return rank_space(runnable_space(workload, system, (workload.remat,)), (mesh,), top=1).plans[0]


def rank_space(
    space: Space, meshes: tuple[MeshShape, ...] | None = None, *, top: int = 8, most_tied: int = 0
) -> Ranking:
    """Return the best `top` meshes of a space, each with its best strategy.

    meshes: the meshes to search; None for all. most_tied: return more than `top` meshes, up to this number, while they
    tie with the best.

    Raises:
        MeshwrightError: no mesh splits the batch into the microbatches that the space fixes.
    """
    shapes = tuple(mesh for mesh in (space.meshes() if meshes is None else meshes) if space.parts(mesh))
    if not shapes:
        raise MeshwrightError(
            f"no mesh leaves a device a multiple of {space.num_microbatches} sequences, one for each microbatch,"
            f" of a batch of {space.workload.batch}"
        )
    search = _Search(space)
    with _without_collector():
        plans: list[Plan] = []
        for plan in search.plans(shapes):
            if len(plans) >= top and not ties(plan, plans[0]):
                break
            plans.append(plan)
            if len(plans) >= max(top, most_tied):
                break
    if len(plans) < min(top, len(shapes)):
        fitting = {plan.mesh for plan in plans}
        closest = _least_memory(space, [mesh for mesh in shapes if mesh not in fitting])
        plans += [_plan(space, candidate) for candidate in closest[: top - len(plans)]]
    return Ranking(tuple(plans), len(shapes), space.num_candidates(shapes), search.num_priced)


@contextmanager
def _without_collector() -> Generator[None]:
    """Disable Python's garbage collector inside the context: the search allocates many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _Group:
    """A set of candidates with the same tokens per microbatch on a device, for which one lower bound is computed.

    The candidates are all combinations of `meshes`, `remats`, and the strategies with `zero_stage` (None: any). The
    first of `remats` saves most activations and is the fastest. has_activation_bound: whether the bound includes
    exposed activation collectives.
    """

    meshes: tuple[MeshShape, ...]
    num_microbatches: int
    remats: tuple[Remat, ...]
    zero_stage: int | None = None
    has_activation_bound: bool = False

    @property
    def remat(self) -> Remat:
        """The policy used for the lower bound: the fastest."""
        return self.remats[0]


@dataclass
class _Search:
    """Best-first search: split the group with the smallest lower bound, until a candidate with an exact time is first.

    The candidates of a group have the same ops, except for recompute. A group is refined in these steps: split by remat
    policy; split by mesh and ZeRO stage, and add exposed weight collectives to the bound; add exposed activation
    collectives; predict the step time of each strategy that fits.

    limit: only plans whose step takes less than this many seconds are found. heap: (seconds, peak bytes, serial number,
    group or candidate), smallest first.
    """

    space: Space
    limit: float = math.inf
    num_priced: int = 0
    heap: list[tuple[float, float, int, object]] = field(default_factory=list[tuple[float, float, int, object]])
    numbers: Iterator[int] = field(default_factory=count)

    def plans(self, meshes: tuple[MeshShape, ...]) -> Iterator[Plan]:
        """Yield the best plan that fits of each mesh that has one: fastest first, equally fast ones by memory."""
        done: set[MeshShape] = set()
        for group in _groups(self.space, meshes):
            self._push(self._bound(group), group)
        while self.heap:
            _, _, _, item = heapq.heappop(self.heap)
            if isinstance(item, _Group):
                self._refine(replace(item, meshes=tuple(mesh for mesh in item.meshes if mesh not in done)))
            elif isinstance(item, Candidate) and item.mesh not in done:
                done.add(item.mesh)
                yield _plan(self.space, item)

    def _push(self, seconds: float, item: object, peak: float = 0.0) -> None:
        """Push a group or a candidate onto the heap if its seconds are below the limit.

        seconds: a group's lower bound or a candidate's step time. peak: a candidate's peak bytes; 0 for groups, so that
        a bound is popped before an equal step time.
        """
        if seconds < self.limit:
            heapq.heappush(self.heap, (seconds, peak, next(self.numbers), item))

    def _refine(self, group: _Group) -> None:
        """Refine a group by one step, and push the resulting groups or candidates onto the heap."""
        if not group.meshes:
            return
        if len(group.remats) > 1:
            others = replace(group, remats=group.remats[1:])
            self._push(self._bound(others), others)
            group = replace(group, remats=group.remats[:1])
        if group.has_activation_bound:
            self._push_candidates(group)
        elif group.zero_stage is not None:
            close = replace(group, has_activation_bound=True)
            self._push(self._bound(close), close)
        elif self._can_fit(group):
            for mesh in group.meshes:
                found = self.space.strategies(mesh, group.num_microbatches, group.remat)
                stages = {strategy.zero_stage for strategy in found}
                for stage in sorted(stages, reverse=True):
                    alone = replace(group, meshes=(mesh,), zero_stage=stage)
                    self._push(self._bound(alone), alone)

    def _bound(self, group: _Group) -> float:
        """Return a lower bound of the step time, in seconds, of every candidate in a group."""
        mesh, workload, system = _most_sharded(group), self.space.with_remat(group.remat), self.space.system
        strategies = self._strategies(group)
        # Collective matmuls expose less communication, but split a matmul into several, which takes longer.
        fastest = max(strategies, key=lambda strategy: strategy.virtual_stages)
        hiding = max(strategies, key=lambda strategy: strategy.collective_matmul)
        communication = NO_COMMUNICATION
        if group.zero_stage is not None:
            least = least_communication if group.has_activation_bound else least_weight_communication
            communication = least(workload, mesh, system, hiding)
        return _BELOW * step_bound_seconds(workload, mesh, system, fastest, communication)

    def _push_candidates(self, group: _Group) -> None:
        """Predict and push each strategy that fits, for a group with only one mesh and one remat policy."""
        (mesh,), workload, system = group.meshes, self.space.with_remat(group.remat), self.space.system
        for strategy in self._strategies(group):
            candidate = Candidate(mesh, group.remat, strategy)
            if (peak := self._fitting_peak(candidate)) is not None:
                self.num_priced += 1
                # Step times that differ only by rounding are equal, so that memory decides.
                seconds = float(f"{step_seconds(workload, mesh, system, strategy):.12g}")
                self._push(seconds, candidate, peak)

    def _can_fit(self, group: _Group) -> bool:
        """Whether any candidate of a group fits in memory: the one that needs the least is tried."""
        candidate = Candidate(_most_sharded(group), group.remat, self._strategies(group)[0])
        return self._fitting_peak(candidate) is not None

    def _fitting_peak(self, candidate: Candidate) -> int | None:
        """Return the peak memory of a candidate in bytes; None if it does not fit."""
        workload, system = self.space.with_remat(candidate.remat), self.space.system
        return peak_within(workload, candidate.mesh, candidate.strategy, system.plannable_bytes, kind=system.chip.kind)

    def _strategies(self, group: _Group) -> list[Strategy]:
        """Return the strategies of a group, on its most sharded mesh."""
        found = self.space.strategies(_most_sharded(group), group.num_microbatches, group.remat)
        return [strategy for strategy in found if group.zero_stage in (None, strategy.zero_stage)]


def _groups(space: Space, meshes: tuple[MeshShape, ...]) -> Iterator[_Group]:
    """Yield all candidates of some meshes in groups; the candidates of a group have the same ops, except for recompute.

    That is, they have the same tp, ep, pp, tokens per device and number of microbatches.
    """
    alike: dict[tuple[int, ...], list[MeshShape]] = {}
    for mesh in meshes:
        shards = mesh.degree(token_axes())
        for parts in space.parts(mesh):
            alike.setdefault((mesh.tp, mesh.ep, mesh.pp, shards, parts), []).append(mesh)
    for (*_, parts), members in alike.items():
        for remats in space.alike_remats(members[0]):
            if running := tuple(mesh for mesh in members if space.has_strategies(mesh, parts, remats[0])):
                yield _Group(running, parts, remats)


def _most_sharded(group: _Group) -> MeshShape:
    """Return the mesh of a group that shards parameters over the most devices: its optimizer update is the shortest.

    Of several such meshes, return the one that splits the sequence least, because attention may gather keys over sp.
    """
    return max(group.meshes, key=lambda mesh: (mesh.fsdp * mesh.sp, mesh.fsdp))


def _least_memory(space: Space, meshes: list[MeshShape]) -> list[Candidate]:
    """Return, for each mesh, its candidate that needs the least memory; the candidates are sorted by memory."""
    candidates = [min(_smallest(space, mesh), key=lambda each: _peak(space, each)) for mesh in meshes]
    return sorted(candidates, key=lambda each: _peak(space, each))


def _smallest(space: Space, mesh: MeshShape) -> Iterator[Candidate]:
    """Yield a mesh's candidates with the most microbatches; one of them needs the least memory."""
    parts = space.parts(mesh)[-1]
    for remat in space.remats:
        for strategy in space.strategies(mesh, parts, remat):
            yield Candidate(mesh, remat, strategy)


def _peak(space: Space, candidate: Candidate) -> int:
    """Return the peak memory of a candidate in bytes."""
    return step_memory(
        space.with_remat(candidate.remat), candidate.mesh, candidate.strategy, kind=space.system.chip.kind
    )["peak"]


def _plan(space: Space, candidate: Candidate) -> Plan:
    """Return the plan of a candidate."""
    return predicted_plan(space.with_remat(candidate.remat), candidate.mesh, space.system, candidate.strategy)
