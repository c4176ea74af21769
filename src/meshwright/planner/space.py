"""The space of a search: every mesh that can split a workload, and every way to run it on one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware import System, lay_mesh
from meshwright.mesh import AXES, MeshShape, divisors
from meshwright.planner.plan import check_kernel
from meshwright.step import (
    DEFAULT,
    REMATS,
    RULES,
    STAGE_REMATS,
    Attention,
    Model,
    Remat,
    SequenceMethod,
    Strategy,
    Workload,
    check_mesh,
    check_positions,
    check_runnable,
    limits,
    num_staged_layers,
    sequence_method,
)
from meshwright.step.blocks import layers
from meshwright.step.layer import Attention as AttentionOfLayer


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload: its mesh, what a layer keeps for backward, and the strategy."""

    mesh: MeshShape
    remat: Remat
    strategy: Strategy


@dataclass(frozen=True, kw_only=True)
class Space:
    """All ways to run a workload on all devices of a system.

    axes: the mesh axes that may be larger than 1. remats: the policies to choose from, whatever the workload's own is.
    base: the strategy that all ways share but for what is searched: microbatches, ZeRO stage, schedule and virtual
    stages. num_microbatches, zero_stage: the only ones, where not None. is_runnable: only what `meshwright train` runs
    today, over tp of GPUs with overlapped products too.
    """

    workload: Workload
    system: System
    axes: tuple[str, ...]
    remats: tuple[Remat, ...]
    base: Strategy
    num_microbatches: int | None = None
    zero_stage: int | None = None
    is_runnable: bool = False

    def meshes(self) -> tuple[MeshShape, ...]:
        """The legal meshes; none is an error that says why one of them is not. Those to run are those JAX takes."""
        found = _legal(self.workload, self.system.num_devices, self.axes)
        return tuple(mesh for mesh in found if self._runs(mesh)) if self.is_runnable else found

    def candidates(self, mesh: MeshShape) -> Iterator[Candidate]:
        """Every way to run a mesh."""
        for parts in self.parts(mesh):
            for remat in self.remats:
                for strategy in self.strategies(mesh, parts, remat):
                    yield Candidate(mesh, remat, strategy)

    def num_candidates(self, meshes: tuple[MeshShape, ...]) -> int:
        """All ways on some meshes."""
        each = (
            len(self.strategies(mesh, parts, remat))
            for mesh in meshes
            for parts in self.parts(mesh)
            for remat in self.remats
        )
        return sum(each)

    def parts(self, mesh: MeshShape) -> list[int]:
        """The numbers of microbatches that a device's batch can be cut into."""
        each = self.workload.batch // mesh.degree(RULES["batch"])
        if self.num_microbatches is not None:
            return [] if each % self.num_microbatches else [self.num_microbatches]
        return _divisors(each)

    def strategies(self, mesh: MeshShape, parts: int, remat: Remat) -> tuple[Strategy, ...]:
        """The strategies of a mesh with so many microbatches, those that want least memory first."""
        # What ZeRO shards is over fsdp; over sp, where parameters are stored too, they are gathered for each use.
        stages = (3, 2, 1) if mesh.fsdp > 1 and mesh.sp == 1 else (3,)
        if self.zero_stage is not None and mesh.fsdp > 1:
            stages = (self.zero_stage,)
        base = _on_mesh(self.base, self.workload.model, mesh)
        found = _strategies(base, num_staged_layers(self.workload.model), mesh.pp, parts, stages)
        return self._of_which_run(mesh, remat, found) if self.is_runnable else found

    def _of_which_run(self, mesh: MeshShape, remat: Remat, found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The strategies that run on a mesh, and those with overlapped products beside them.

        Simulated devices send nothing while they compute; on TPUs what rings copy took longer than what they hid, in
        the schedule of two layers of Llama-2-7B on v5e:2x4 with tp=4 (libtpu 0.0.42.1), and is not priced yet.
        """
        kept = [way for way in found if mesh.pp == 1 or remat in STAGE_REMATS[way.schedule]]
        if mesh.tp > 1 and self.system.chip.kind == "gpu":
            kept = [ring for way in kept for ring in _with_and_without_rings(way)]
        return tuple(way for way in kept if _does_run(self.workload.model, mesh, way))

    def _runs(self, mesh: MeshShape) -> bool:
        """Whether what runs takes a mesh."""
        if lay_mesh(self.system, mesh.layout).is_refused:
            return False
        return any(self.strategies(mesh, parts, remat) for parts in self.parts(mesh)[:1] for remat in self.remats)

    def with_remat(self, remat: Remat) -> Workload:
        """The workload with a policy."""
        return _with_remat(self.workload, remat)


def whole_space(workload: Workload, system: System, remats: tuple[Remat, ...] = (), **choices: Any) -> Space:
    """Everything that can be planned: all axes, and attention as chips at scale run it (`planned_attention`).

    remats: the policies to choose from; all that differ where none is said. choices: fields of the strategy that are
    not to be searched, or to be other than the default; None says nothing.
    """
    said = {name: value for name, value in choices.items() if value is not None}
    only = {name: said.pop(name, None) for name in ("num_microbatches", "zero_stage")}
    base = replace(DEFAULT, **({"attention": planned_attention(system)} | said))
    check_kernel(system, base)
    return Space(
        workload=workload,
        system=system,
        axes=AXES,
        remats=remats or _policies(base),
        base=base,
        **only,
    )


def _policies(base: Strategy) -> tuple[Remat, ...]:
    """The policies that differ: a fused kernel leaves no scores to drop; what the host keeps is asked for by name."""
    left_out = ("offload",) if base.attention == "scores" else ("offload", "attention")
    return tuple(remat for remat in REMATS if remat not in left_out)


def runnable_space(workload: Workload, system: System, remats: tuple[Remat, ...] = ()) -> Space:
    """What `meshwright train` runs today; an error that says why where that is nothing."""
    check_runnable(workload.model, MeshShape())
    base = replace(DEFAULT, attention=run_attention(workload.model, system))
    return Space(
        workload=workload, system=system, axes=AXES, remats=remats or _policies(base), base=base, is_runnable=True
    )


def run_strategy(model: Model, mesh: MeshShape, system: System) -> Strategy:
    """How a step is run on a mesh of which nothing else is said."""
    return _on_mesh(replace(DEFAULT, attention=run_attention(model, system)), model, mesh)


def run_attention(model: Model, system: System) -> Attention:
    """How a step computes attention where nothing is said: by a fused kernel on TPUs, but for scores with a cap.

    GPUs have cuDNN's, where `attention='cudnn'` asks for it.
    """
    is_capped = any(isinstance(op, AttentionOfLayer) and op.softcap for stack in layers(model) for op in stack.ops)
    return "flash" if system.chip.kind == "tpu" and not is_capped else "scores"


def planned_attention(system: System) -> Attention:
    """How a plan takes attention to be computed: by a fused kernel; on simulated CPU devices through memory."""
    return "scores" if system.chip.kind == "cpu" else "flash"


def factorings(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many, in order."""
    if count == 1:
        yield (product,)
        return
    for first in _divisors(product):
        for rest in factorings(product // first, count - 1):
            yield (first, *rest)


@lru_cache(maxsize=1 << 6)
def _legal(workload: Workload, num_devices: int, axes: tuple[str, ...]) -> tuple[MeshShape, ...]:
    """The meshes of so many devices that can split a workload."""
    check_positions(workload.model, workload.seq_len)
    sizes = [(size, [axes.index(axis) for axis in over if axis in axes]) for size, over in limits(workload)]
    stages = axes.index("pp") if "pp" in axes else None
    found, shapes = list[MeshShape](), list(factorings(num_devices, len(axes)))
    for degrees in shapes:
        if stages is not None and degrees[stages] > workload.model.num_layers:
            continue
        for size, over in sizes:
            for index in over:
                if size % degrees[index]:
                    break
                size //= degrees[index]
            else:
                continue
            break
        else:
            found.append(MeshShape(**dict(zip(axes, degrees, strict=True))))
    if not found:
        raise MeshwrightError(_none_legal(workload, num_devices, axes, shapes))
    return tuple(found)


def _none_legal(workload: Workload, num_devices: int, axes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> str:
    """The message where no mesh is legal, with the reason of the first."""
    mesh = MeshShape(**dict(zip(axes, shapes[0], strict=True)))
    try:
        check_mesh(workload, mesh)
    except MeshwrightError as error:
        reason = str(error)
    else:
        raise AssertionError(f"{mesh} is legal, but not within the limits of its workload")
    return (
        f"none of {len(shapes)} meshes of {num_devices} devices can split {workload.model.name} with a batch"
        f" of {workload.batch} x {workload.seq_len} tokens; for one, {mesh}: {reason}"
    )


@lru_cache(maxsize=1 << 12)
def _strategies(
    base: Strategy, num_layers: int, stages: int, parts: int, zero: tuple[int, ...]
) -> tuple[Strategy, ...]:
    """The strategies of one number of microbatches.

    A schedule matters to a pipeline alone. Virtual stages want layers that divide evenly and whole rounds of
    microbatches (arXiv:2104.04473, section 2.2).
    """
    each, rest = divmod(num_layers, stages)
    schedules = [("1f1b", 1)]
    if stages > 1:
        virtual = _divisors(each)[1:] if not rest and parts % stages == 0 else []
        schedules += [("1f1b", v) for v in virtual] + [("gpipe", 1)]
    return tuple(
        replace(base, num_microbatches=parts, zero_stage=stage, schedule=schedule, virtual_stages=v)  # pyright: ignore[reportArgumentType]
        for stage in zero
        for schedule, v in schedules
    )


@lru_cache(maxsize=1 << 14)
def _does_run(model: Model, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether what runs takes a strategy on a mesh."""
    try:
        check_runnable(model, mesh, strategy)
    except MeshwrightError:
        return False
    return True


def _on_mesh(base: Strategy, model: Model, mesh: MeshShape) -> Strategy:
    """The strategy, with the best method of a mesh that splits the sequence; scores gather it."""
    if mesh.sp == 1 or base.attention == "scores":
        return base
    return _with_sequence(base, sequence_method(model, mesh))


@lru_cache(maxsize=1 << 12)
def _with_and_without_rings(base: Strategy) -> tuple[Strategy, ...]:
    """The strategy, and the same with overlapped products."""
    return base, replace(base, collective_matmul=True)


@lru_cache(maxsize=1 << 5)
def _with_sequence(base: Strategy, method: SequenceMethod) -> Strategy:
    """The strategy with a method for a split sequence, the same object each time."""
    return replace(base, sp_method=method)


@lru_cache(maxsize=1 << 5)
def _with_remat(workload: Workload, remat: Remat) -> Workload:
    """The workload with a policy, the same object each time."""
    return replace(workload, remat=remat)


@lru_cache(maxsize=1 << 10)
def _divisors(size: int) -> list[int]:
    """Every whole number that divides a size."""
    return divisors(size)
