"""The space of a search: every mesh that can split a workload, and every configuration on each mesh.

A configuration is a mesh, a remat policy and a strategy. It is runnable if `meshwright train` can run it; others can
only be planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.step.blocks import layers
from meshwright.description.step.layer import Attention as AttentionOfLayer
from meshwright.description.step.legality import check_mesh, check_positions, check_runnable, has_reference, limits
from meshwright.description.step.model import Model
from meshwright.description.step.padding import divides_padded, kv_copies
from meshwright.description.step.rules import RULES, stream_rules
from meshwright.description.step.sequence import sequence_method
from meshwright.description.step.stages import STAGE_REMATS, most_stages, num_cycles
from meshwright.description.step.strategy import DEFAULT, Attention, SequenceMethod, Strategy, TpStream
from meshwright.description.step.workload import REMATS, Remat, Workload, with_remat
from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, MeshShape, divisors
from meshwright.planning.plan import check_kernel

MOST_TP_WITH_COPIES = 8
"""The largest tp for which a search copies kv heads: the GPUs of a node. More devices split the sequence (sp)."""


@dataclass(frozen=True)
class Candidate:
    """One configuration: mesh, remat policy and strategy."""

    mesh: MeshShape
    remat: Remat
    strategy: Strategy


@dataclass(frozen=True, kw_only=True)
class Space:
    """All configurations of a workload on all devices of a system.

    Attributes:
        axes: mesh axes that may be larger than 1.
        remats: remat policies to choose from.
        bases: strategies that differ only in attention, best first. A mesh's strategies are variants of the first one
            that it supports.
        num_microbatches, zero_stage: fixed values, or None to search them.
        is_runnable: whether the space has only runnable configurations; on GPUs these include collective matmuls over
            tp.
    """

    workload: Workload
    system: System
    axes: tuple[str, ...]
    remats: tuple[Remat, ...]
    bases: tuple[Strategy, ...]
    num_microbatches: int | None = None
    zero_stage: int | None = None
    is_runnable: bool = False

    def meshes(self) -> tuple[MeshShape, ...]:
        """Return the legal meshes. Raises if there are none, with the reason for one mesh."""
        found = _legal(self.workload, self.system.num_devices, self.axes, self.bases[0].tp_stream)
        return tuple(mesh for mesh in found if self.runs(mesh)) if self.is_runnable else found

    def candidates(self, mesh: MeshShape) -> Iterator[Candidate]:
        """Yield every configuration of a mesh."""
        for parts in self.parts(mesh):
            for remat in self.remats:
                for strategy in self.strategies(mesh, parts, remat):
                    yield Candidate(mesh, remat, strategy)

    def num_candidates(self, meshes: tuple[MeshShape, ...]) -> int:
        """Return the number of configurations of some meshes."""
        return sum(
            len(remats) * len(self._forms(mesh, parts, remats[0]))
            for mesh in meshes
            for remats in self.alike_remats(mesh)
            for parts in self.parts(mesh)
        )

    def parts(self, mesh: MeshShape) -> list[int]:
        """Return the numbers of microbatches that are possible on a mesh, in ascending order."""
        each = self.workload.batch // mesh.degree(RULES["batch"])
        if self.num_microbatches is not None:
            return [] if each % self.num_microbatches else [self.num_microbatches]
        return _divisors(each)

    def strategies(self, mesh: MeshShape, parts: int, remat: Remat) -> tuple[Strategy, ...]:
        """Return the strategies of a mesh with `parts` microbatches, least memory first."""
        return _with_microbatches(self._forms(mesh, parts, remat), parts)

    def alike_remats(self, mesh: MeshShape) -> tuple[tuple[Remat, ...], ...]:
        """Return the remat policies grouped by equal strategies on a mesh; policies that save more come first.

        Policies of other frameworks are not comparable with meshwright's, so each is a separate group.
        """
        if self._is_by_remat(mesh):
            return tuple((remat,) for remat in self.remats)
        found: list[tuple[Remat, ...]] = [tuple(remat for remat in REMATS if remat in self.remats)]
        found.extend((remat,) for remat in self.remats if remat not in REMATS)
        return tuple(filter(None, found))

    def _is_by_remat(self, mesh: MeshShape) -> bool:
        """Whether a mesh's strategies depend on the remat policy: runnable schedules support only some policies."""
        return self.is_runnable and mesh.pp > 1

    def _forms(self, mesh: MeshShape, parts: int, remat: Remat) -> tuple[Strategy, ...]:
        """Return a mesh's strategies for `parts` microbatches, before `num_microbatches` is set to `parts`.

        They depend on `parts` only by whether pp divides it, so they are cached (`_known_forms`).
        """
        is_whole = parts % mesh.pp == 0
        forms = self._known_forms.get((mesh, is_whole))
        if forms is None:
            found = (self._of_base(base, mesh, is_whole) for base in self.bases)
            forms = self._known_forms[mesh, is_whole] = next(filter(None, found), ())
        if not self._is_by_remat(mesh):
            return forms
        return tuple(form for form in forms if remat in STAGE_REMATS[form.schedule])

    def _of_base(self, base: Strategy, mesh: MeshShape, is_whole: bool) -> tuple[Strategy, ...]:
        """Return the variants of a strategy with every ZeRO stage and schedule that are possible on a mesh.

        is_whole: whether pp divides the number of microbatches.
        """
        # There is a choice of ZeRO stage only for fsdp: over sp, parameters are always gathered for each use, as in
        # stage 3. So do the references of DPO that read quantised weights.
        is_shared = self.workload.quantize_base is not None and has_reference(self.workload)
        stages = (3, 2, 1) if mesh.fsdp > 1 and mesh.sp == 1 and not is_shared else (3,)
        if self.zero_stage is not None and mesh.fsdp > 1:
            stages = (self.zero_stage,)
        model = self.workload.model
        found = _forms(_on_mesh(base, model, mesh), num_cycles(model), mesh.pp, is_whole, stages)
        return self._runnable_strategies(mesh, found) if self.is_runnable else found

    @cached_property
    def _known_forms(self) -> dict[tuple[MeshShape, bool], tuple[Strategy, ...]]:
        """Cache of a mesh's strategies, by mesh and by whether pp divides the number of microbatches."""
        return {}

    def _runnable_strategies(self, mesh: MeshShape, found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies of `found` that run on a mesh; on GPUs also their variants with collective matmuls.

        There are no such variants on simulated devices, which cannot overlap, nor on TPUs: for two layers of Llama-2-7B
        on v5e:2x4 with tp=4, the ring's copies took longer than the communication they hid (libtpu 0.0.42.1).
        """
        if mesh.tp > 1 and self.system.chip.kind == "gpu":
            found = tuple(ring for form in found for ring in _with_and_without_rings(form))
        shape = _run_shape(mesh)
        return tuple(form for form in found if _does_run(self.workload.model, shape, form))

    def runs(self, mesh: MeshShape) -> bool:
        """Whether `jax.make_mesh` can make a mesh, and some strategy of the space runs on it."""
        if lay_mesh(self.system, mesh.layout).is_refused:
            return False
        return any(self.has_strategies(mesh, parts, remat) for parts in self.parts(mesh)[:1] for remat in self.remats)

    def has_strategies(self, mesh: MeshShape, parts: int, remat: Remat) -> bool:
        """Whether a mesh has a strategy with `parts` microbatches and this remat policy."""
        return bool(self._forms(mesh, parts, remat))

    def with_remat(self, remat: Remat) -> Workload:
        """Return the workload with another remat policy."""
        return with_remat(self.workload, remat)


def whole_space(workload: Workload, system: System, remats: tuple[Remat, ...] = (), **choices: Any) -> Space:
    """Return the search space of everything that can be planned, even if `meshwright train` cannot run it.

    remats: policies to choose from; all by default. choices: values of strategy fields that are fixed; None leaves a
    field open. Attention is by default `planned_attention`.
    """
    return _space(workload, system, remats, choices, (planned_attention(system),), is_runnable=False)


def runnable_space(workload: Workload, system: System, remats: tuple[Remat, ...] = (), **choices: Any) -> Space:
    """Return the search space of what `meshwright train` can run. Raises if it cannot run the model.

    Arguments as in `whole_space`; attention is by default from `run_attentions`.
    """
    check_runnable(workload.model, MeshShape())
    return _space(workload, system, remats, choices, run_attentions(workload, system), is_runnable=True)


def _space(
    workload: Workload,
    system: System,
    remats: tuple[Remat, ...],
    choices: Mapping[str, Any],
    attentions: tuple[Attention, ...],
    *,
    is_runnable: bool,
) -> Space:
    """Return the search space of all that can be planned or, with `is_runnable`, of what `meshwright train` can run.

    attentions: implementations to choose from, best first, unless `choices` fixes attention.
    """
    said = {name: value for name, value in choices.items() if value is not None}
    only = {name: said.pop(name, None) for name in ("num_microbatches", "zero_stage")}
    bases = tuple(replace(DEFAULT, **({"attention": attention} | said)) for attention in attentions)
    bases = tuple(dict.fromkeys(bases))
    for base in bases:
        check_kernel(workload.model, system, base)
    # On other chips than TPUs, `offload` must be requested. With a fused kernel no scores are saved, so the policy
    # `attention` is the same as `none`.
    left_out = () if system.chip.kind == "tpu" else ("offload",)
    left_out += () if bases[0].attention == "scores" else ("attention",)
    return Space(
        workload=workload,
        system=system,
        axes=AXES,
        remats=remats or tuple(remat for remat in REMATS if remat not in left_out),
        bases=bases,
        is_runnable=is_runnable,
        **only,
    )


def run_strategy(workload: Workload, mesh: MeshShape, system: System) -> Strategy:
    """Return the strategy that `meshwright train` uses by default on a mesh."""
    model = workload.model
    found = [_on_mesh(replace(DEFAULT, attention=each), model, mesh) for each in run_attentions(workload, system)]
    return next((strategy for strategy in found if _does_run(model, mesh, strategy)), found[-1])


def run_attentions(workload: Workload, system: System) -> tuple[Attention, ...]:
    """Return the attention implementations that `meshwright train` can use for a workload, best first.

    No kernel supports a softcap on scores. cuDNN's supports only half precision, head sizes up to the chip's limit that
    are a multiple of 8 (JAX 0.10.2, `jax/_src/cudnn/fused_attention_stablehlo.py`), one document per row, no chunked
    windows, and not all meshes.
    """
    ops = [op for stack in layers(workload.model) for op in stack.ops if isinstance(op, AttentionOfLayer)]
    if any(op.softcap for op in ops) or system.chip.kind == "cpu":
        return ("scores",)
    if system.chip.kind == "tpu":
        return ("flash",)
    has_cudnn = workload.compute_dtype == "bf16" and not workload.packed and not any(op.is_chunked for op in ops)
    has_cudnn &= all(op.value_dim <= op.qk_dim <= system.chip.attention_head_dim and op.qk_dim % 8 == 0 for op in ops)
    return ("cudnn", "scores") if has_cudnn else ("scores",)


def planned_attention(system: System) -> Attention:
    """Return the attention that plans assume by default: a fused kernel; on simulated devices, scores in memory."""
    return "scores" if system.chip.kind == "cpu" else "flash"


def factorings(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `count` factors whose product is `product`; the order of factors matters."""
    if count == 1:
        yield (product,)
        return
    for first in _divisors(product):
        for rest in factorings(product // first, count - 1):
            yield (first, *rest)


@lru_cache(maxsize=1 << 6)
def _legal(workload: Workload, num_devices: int, axes: tuple[str, ...], tp_stream: TpStream) -> tuple[MeshShape, ...]:
    """Return the meshes of `num_devices` devices that can split a workload."""
    check_positions(workload.model, workload.seq_len)
    rules = stream_rules(tp_stream)
    sizes = [(size, [axes.index(axis) for axis in over if axis in axes]) for size, over in limits(workload, rules)]
    stages = axes.index("pp") if "pp" in axes else None
    found, shapes = list[MeshShape](), list(factorings(num_devices, len(axes)))
    most = most_stages(workload.model)
    for degrees in shapes:
        if stages is not None and degrees[stages] > most:
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
            mesh = MeshShape(**dict(zip(axes, degrees, strict=True)))
            copies = kv_copies(workload.model, mesh, rules)
            if divides_padded(workload.model, mesh, rules) and (not copies or mesh.tp <= MOST_TP_WITH_COPIES):
                found.append(mesh)
    if not found:
        mesh = MeshShape(**dict(zip(axes, shapes[0], strict=True)))
        try:
            check_mesh(workload, mesh, stream_rules(tp_stream))
        except MeshwrightError as error:
            reason = str(error)
        else:
            raise AssertionError(f"{mesh} is legal, but not within the limits of its workload")
        raise MeshwrightError(
            f"none of {len(shapes)} meshes of {mesh.num_devices} devices can split {workload.model.name} with a batch"
            f" of {workload.batch} x {workload.seq_len} tokens; for one, {mesh}: {reason}"
        )
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def _forms(base: Strategy, num_cycles: int, stages: int, is_whole: bool, zero: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Return the variants of a strategy with every ZeRO stage in `zero` and every pipeline schedule.

    Virtual stages need equally many cycles of layers each, and microbatches in multiples of the stages
    (arXiv:2104.04473, section 2.2). is_whole: whether `stages` divides the number of microbatches. The variants have
    `stages` or 1 microbatches as a placeholder, which `_with_microbatches` replaces.
    """
    each, rest = divmod(num_cycles, stages)
    schedules = [("1f1b", 1)]
    if stages > 1:
        virtual = _divisors(each)[1:] if not rest and is_whole else []
        schedules += [("1f1b", v) for v in virtual] + [("gpipe", 1)]
    parts = stages if is_whole else 1
    return tuple(
        replace(base, num_microbatches=parts, zero_stage=stage, schedule=schedule, virtual_stages=v)  # pyright: ignore[reportArgumentType]
        for stage in zero
        for schedule, v in schedules
    )


@lru_cache(maxsize=1 << 12)
def _with_microbatches(forms: tuple[Strategy, ...], parts: int) -> tuple[Strategy, ...]:
    """Return the strategies with `parts` microbatches; the objects are cached."""
    return tuple(replace(form, num_microbatches=parts) for form in forms)


@lru_cache(maxsize=1 << 14)
def _does_run(model: Model, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether `meshwright train` runs a strategy on a mesh."""
    try:
        check_runnable(model, mesh, strategy)
    except MeshwrightError:
        return False
    return True


@lru_cache(maxsize=1 << 12)
def _run_shape(mesh: MeshShape) -> MeshShape:
    """Return the mesh with degree 1 for dp and, without pp, for fsdp: these degrees do not affect what runs."""
    return replace(mesh, dp=1) if mesh.pp > 1 else replace(mesh, dp=1, fsdp=1)


def _on_mesh(base: Strategy, model: Model, mesh: MeshShape) -> Strategy:
    """Return a strategy with the best method to split sequences over sp, unless it has one already.

    Attention with `scores` always gathers keys. cuDNN's kernel needs whole sequences, so it gets Ulysses.
    """
    if mesh.sp == 1 or base.attention == "scores" or base.sp_method != DEFAULT.sp_method:
        return base
    if base.attention == "cudnn":
        return _with_sequence(base, "ulysses")
    return _with_sequence(base, sequence_method(model, mesh))


@lru_cache(maxsize=1 << 12)
def _with_and_without_rings(base: Strategy) -> tuple[Strategy, ...]:
    """Return the strategy without and with collective matmuls."""
    return base, replace(base, collective_matmul=True)


@lru_cache(maxsize=1 << 5)
def _with_sequence(base: Strategy, method: SequenceMethod) -> Strategy:
    """Return the strategy with a method to split sequences; cached, so that equal results are the same object."""
    return replace(base, sp_method=method)


@lru_cache(maxsize=1 << 10)
def _divisors(size: int) -> list[int]:
    """Return all divisors of a number (cached)."""
    return divisors(size)
