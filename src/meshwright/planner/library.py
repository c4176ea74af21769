"""`meshwright.plan`: a plan from text or objects, and the plan that `verify` and `train` run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from meshwright.errors import MeshwrightError
from meshwright.hardware import System
from meshwright.mesh import MeshShape
from meshwright.planner.options import (
    STRATEGY_OPTIONS,
    WORKLOAD_OPTIONS,
    Count,
    MeshLike,
    ModelLike,
    MoreOptions,
    PlanOptions,
    SystemLike,
    check_model,
    given,
    is_image_model,
    read_count,
    read_mesh,
    read_strategy,
    read_workload,
    remats,
)
from meshwright.planner.plan import Plan, as_run, is_plan_file, make_plan, read_plan
from meshwright.planner.search import Ranking, find_best, plan_stages, rank_space
from meshwright.planner.space import Space, run_strategy, runnable_space, whole_space
from meshwright.planner.ties import simplest_first
from meshwright.step import (
    DEFAULT,
    REMATS,
    Dtype,
    Remat,
    Strategy,
    Workload,
    check_mesh,
    check_positions,
    check_strategy,
    has_reference,
    stream_rules,
)

PlanLike = ModelLike | Plan
"""A model as in `ModelLike`, a plan, or the path of a plan's file."""

ALWAYS_CHOSEN = ("schedule", "virtual_stages", "sp_method")
"""The fields that a search over meshes always chooses itself."""

MOST_TIED = 8
"""The meshes among which ties are looked for."""


def plan(
    model: ModelLike,
    on: SystemLike | None = None,
    *rest: object,
    batch: Count | None = None,
    batch_tokens: Count | None = None,
    seq_len: Count | None = None,
    mesh: MeshLike | None = None,
    remat: Remat | Literal["auto"] | None = None,
    dtype: Dtype | None = None,
    top: int = 8,
    include_planned: bool = False,
    strategy: Strategy | None = None,
    **options: Unpack[MoreOptions],
) -> Plan:
    """Plan the training of a model on some hardware: the best mesh and the best way to run it.

    Args:
        model: a preset's name (`llama3-8b`), the path of a Hugging Face config.json, a ModelConfig or a Workload.
        on: the hardware, as `v5p:4x4x4`, `h100:64` or `cpu:8`, or a System.
        batch: sequences of the global batch; or batch_tokens, the same in tokens.
        seq_len: tokens of a sequence; by default what the model was trained on.
        mesh: plan this mesh, `fsdp=-1,tp=4` or a MeshShape, instead of the best.
        remat: what a layer keeps for backward; by default the planner chooses.
        dtype: what products are computed in: bf16, on simulated CPU devices f32.
        top: how many meshes to rank; those after the best are `Plan.alternatives`.
        include_planned: plan what `meshwright train` does not run today too; without it only where nothing runs.
        strategy: run the mesh exactly so; it goes with mesh.
        options: single fields of the strategy (`StrategyOptions`), param_dtype, num_layers and hardware.

    Raises:
        MeshwrightError: where nothing is legal, a name is unknown or a value is of the wrong type.

    >>> plan("llama3-8b", on="v5p:4x4x4", batch=512, mesh="fsdp=64").mesh
    MeshShape(dp=1, fsdp=64, tp=1, sp=1, ep=1, pp=1)
    """
    if is_image_model(model):
        raise MeshwrightError(f"{model} is a model of images; meshwright.planner.plan_images plans it")
    check_model(model)
    if on is None or rest:
        wrong = "takes model and on by their places, and the rest by name" if rest else "needs the hardware"
        raise MeshwrightError(f"plan {wrong}, as mw.plan('llama3-8b', on='v5p:4x4x4', batch=512)")
    given(options, (*MoreOptions.__annotations__, "on", "batch", "batch_tokens", "seq_len", "mesh", "remat", "dtype"))
    asked = {"on": on, "batch": batch, "batch_tokens": batch_tokens, "seq_len": seq_len, "remat": remat, "dtype": dtype}
    workload, system = read_workload(model, asked | _only(options, WORKLOAD_OPTIONS))
    fields = read_strategy(_only(options, STRATEGY_OPTIONS), system.num_devices)
    policies = (workload.remat,) if isinstance(model, Workload) else remats(remat)
    if strategy is not None and (mesh is None or fields):
        wrong = f"{next(iter(fields))} beside it says it twice" if fields else "give mesh too, or single fields of it"
        raise MeshwrightError(f"strategy says how one mesh is run; {wrong}")
    if mesh is not None:
        shape = read_mesh(mesh, system.num_devices)
        if strategy is not None:
            return make_plan(workload, shape, system, strategy)
        return plan_one_mesh(workload, shape, system, policies, fields, include_planned=include_planned)
    ranking = find_meshes(
        workload, system, policies, fields, top=read_count("top", top), include_planned=include_planned
    )
    return replace(ranking.plans[0], alternatives=ranking.plans[1:])


def find_meshes(
    workload: Workload,
    system: System,
    policies: tuple[Remat, ...],
    fields: Mapping[str, Any],
    *,
    top: int = 8,
    include_planned: bool = False,
) -> Ranking:
    """The best meshes that `meshwright train` runs, with the given fields of a strategy held fixed.

    With include_planned, and where nothing runs, the best of everything that can be planned. Of plans that tie the
    simplest is first.
    """
    if chosen := [name for name in ALWAYS_CHOSEN if name in fields]:
        raise MeshwrightError(f"{chosen[0]} goes with a mesh; without one the planner chooses it")
    if "reference_mesh" in fields and not has_reference(workload):
        raise MeshwrightError("reference_mesh is of the frozen model of objective='dpo', which this step runs none of")
    space = _space(workload, system, policies, fields, include_planned=include_planned)
    ranking = rank_space(space, top=max(top, MOST_TIED))
    plans, num_tied = simplest_first(ranking.plans)
    return replace(ranking, plans=plans[:top], num_tied=min(num_tied, top))


def find_beyond(best: Plan, policies: tuple[Remat, ...], fields: Mapping[str, Any]) -> Plan | None:
    """The best that can be planned, where it is faster than the best that runs, or fits where that does not."""
    found = find_best(best.workload, best.system, remats=policies, **fields)
    if not found.predicted.fits or not found.planned_only:
        return None
    is_faster = (found.predicted.step_seconds or 0.0) < (best.predicted.step_seconds or 0.0)
    return found if is_faster or not best.predicted.fits else None


def plan_one_mesh(
    workload: Workload,
    mesh: MeshShape,
    system: System,
    policies: tuple[Remat, ...],
    fields: Mapping[str, Any],
    *,
    include_planned: bool = False,
) -> Plan:
    """The best way to run one mesh, with the given fields of a strategy held fixed; of those that run, where any do."""
    fixed = {name: fields[name] for name in ALWAYS_CHOSEN if name in fields}
    free = {name: value for name, value in fields.items() if name not in fixed}
    if fixed.get("sp_method", "gather") != "gather":
        free.setdefault("attention", "flash")
    check_positions(workload.model, workload.seq_len)
    held = replace(DEFAULT, **free)
    check_mesh(workload, mesh, stream_rules(held.tp_stream))
    check_strategy(workload, mesh, held)
    space = _space(workload, system, policies, free, mesh, include_planned=include_planned)
    if not fixed:
        return rank_space(space, (mesh,), top=1).plans[0]
    stages = {name: value for name, value in fixed.items() if name != "sp_method"}
    candidates = [
        candidate
        for candidate in space.candidates(mesh)
        if all(getattr(candidate.strategy, name) == value for name, value in stages.items())
    ]
    if not candidates and space.is_runnable:
        return plan_one_mesh(workload, mesh, system, policies, fields, include_planned=True)
    if not candidates:
        said = ", ".join(f"{name}={value}" for name, value in stages.items())
        raise MeshwrightError(f"{said} cannot run mesh {mesh}: schedules are of pp, and virtual stages divide layers")
    plans = [
        make_plan(replace(workload, remat=candidate.remat), mesh, system, replace(candidate.strategy, **fixed))
        for candidate in candidates
    ]
    return min(plans, key=lambda found: (not found.predicted.fits, found.predicted.step_seconds or 0.0))


def _space(
    workload: Workload,
    system: System,
    policies: tuple[Remat, ...],
    fields: Mapping[str, Any],
    mesh: MeshShape | None = None,
    *,
    include_planned: bool,
) -> Space:
    """What `meshwright train` runs of a workload, or on one mesh; where that is nothing, all that can be planned."""
    if not include_planned:
        try:
            space = runnable_space(workload, system, policies, **fields)
        except MeshwrightError:  # Nothing runs the model yet; `Plan.planned_only` says why.
            pass
        else:
            if space.runs(mesh) if mesh is not None else any(map(space.parts, space.meshes())):
                return space
    return whole_space(workload, system, policies, **fields)


def plan_as_train_runs(workload: Workload, mesh: MeshShape, system: System) -> Plan:
    """The plan of one mesh as `meshwright train` runs it where nothing else is said."""
    if mesh.pp > 1:
        return plan_stages(workload, mesh, system)
    return make_plan(workload, mesh, system, run_strategy(workload, mesh, system))


def plan_to_run(what: PlanLike, options: Mapping[str, Any]) -> Plan:
    """The plan that `verify` and `train` are given: a plan, its file, or a model with `PlanOptions`; it runs.

    A plan says its workload and mesh itself; how it is run (`StrategyOptions`, param_dtype) may still be changed.
    """
    said = given(options, PlanOptions.__annotations__)
    changes = {name: said.pop(name) for name in (*STRATEGY_OPTIONS, "param_dtype") if name in said}
    if isinstance(what, (str, Path)) and is_plan_file(what):
        what = read_plan(Path(what))
    if isinstance(what, Plan):
        if said:
            named = ", ".join(f"--{name.replace('_', '-')} ({name}=…)" for name in said)
            raise MeshwrightError(f"a plan says {named} itself; leave it out")
        return run_as(as_run(what), changes)
    mesh = said.pop("mesh", None)
    workload, system = read_workload(what, said)
    if mesh is not None:
        found = plan_as_train_runs(workload, read_mesh(mesh, system.num_devices), system)
    else:
        policies = REMATS if said.get("remat") == "auto" else (workload.remat,)
        found = find_meshes(workload, system, policies, {}, top=1).plans[0]
    return run_as(as_run(found), changes)


def run_as(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """A plan with some options of how it is run changed; a way that does not run is an error."""
    if not changes:
        return plan
    fields = {name: value for name, value in changes.items() if name != "param_dtype"}
    said = read_strategy(fields, plan.system.num_devices)
    if said.get("sp_method", "gather") != "gather":
        said.setdefault("attention", "flash")
    workload = replace(plan.workload, param_dtype=changes.get("param_dtype", plan.workload.param_dtype))
    return as_run(make_plan(workload, plan.mesh, plan.system, replace(plan.strategy, **said)))


def _only(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The options of these names."""
    return {name: value for name, value in options.items() if name in names}
