"""`meshwright.plan`, whose arguments may be text or objects, and the plans that `verify` and `train` run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from meshwright.description.frameworks.framework import framework_fields
from meshwright.description.hardware.system import System
from meshwright.description.step.legality import check_mesh, check_positions, check_strategy, has_reference
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.rules import stream_rules
from meshwright.description.step.serving import CacheSplit, ServingPhase
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import REMATS, Remat, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.options.given import given
from meshwright.options.keywords import PlanOptions, SearchOptions, ServingOptions
from meshwright.options.values import Count, MeshLike, SystemLike, read_compared, read_count, read_mesh, read_price
from meshwright.planning.files import is_run_directory
from meshwright.planning.options import (
    SERVING_OPTIONS,
    STRATEGY_OPTIONS,
    WORKLOAD_OPTIONS,
    ModelLike,
    check_model,
    read_strategy,
    read_workload,
    remats,
)
from meshwright.planning.plan import Plan, as_run, is_plan_file, make_plan, read_plan
from meshwright.planning.search import Ranking, find_faster, plan_stages, rank_space
from meshwright.planning.serving.plan import ServingPlan
from meshwright.planning.serving.search import best_serving_plan
from meshwright.planning.space import Space, run_strategy, runnable_space, whole_space
from meshwright.planning.sweep import Point, read_sweep, run_sweep, swept_options
from meshwright.planning.ties import simplest_first
from meshwright.planning.why.training_run import training_run
from meshwright.support.field_types import check_value

if TYPE_CHECKING:
    from meshwright.proof.program_plans.plan import ProgramPlan

PlanLike = ModelLike | Plan
"""A model as in `ModelLike`, a plan, or the path of a plan file."""

ALWAYS_CHOSEN = ("schedule", "virtual_stages", "sp_method")
"""Strategy fields that the search always chooses; they can be set only together with a mesh."""

LEAST_RANKED, MOST_TIED = 8, 32
"""A search ranks at least `LEAST_RANKED` meshes, and up to `MOST_TIED` as long as they tie with the best."""


@overload
def plan(
    model: ModelLike, on: SystemLike | None = None, *, sweep: str, **options: Unpack[SearchOptions]
) -> tuple[Point, ...]: ...


@overload
def plan(
    model: ModelLike, on: SystemLike | None = None, *, compare_systems: Sequence[SystemLike],
    **options: Unpack[SearchOptions],
) -> tuple[Plan, ...]: ...  # fmt: skip


@overload
def plan(
    model: ModelLike, on: SystemLike | None = None, *, compare: Sequence[MeshLike], **options: Unpack[SearchOptions]
) -> tuple[Plan, ...]: ...


@overload
def plan(
    model: ModelLike,
    on: SystemLike | None = None,
    *,
    mesh: MeshLike | None = None,
    top: Count | None = None,
    strategy: Strategy | None = None,
    tokens: Count | None = None,
    price: float | str | None = None,
    **options: Unpack[SearchOptions],
) -> Plan: ...


@overload
def plan(
    model: str | Path | ModelConfig,
    *on: SystemLike,
    serve: ServingPhase,
    mesh: MeshLike | None = None,
    cache: CacheSplit | None = None,
    **options: Unpack[ServingOptions],
) -> ServingPlan: ...


@overload
def plan(
    model: Callable[..., Any],
    *args: Any,
    on: SystemLike,
    mesh: MeshLike | None = None,
    num_compiled: int = 3,
    **kwargs: Any,
) -> ProgramPlan: ...


def plan(
    model: ModelLike | Callable[..., Any],
    *args: Any,
    on: SystemLike | None = None,
    mesh: MeshLike | None = None,
    compare: Sequence[MeshLike] | None = None,
    compare_systems: Sequence[SystemLike] | None = None,
    sweep: str | None = None,
    top: Count | None = None,
    strategy: Strategy | None = None,
    tokens: Count | None = None,
    price: float | str | None = None,
    serve: ServingPhase | None = None,
    **options: Any,
) -> Plan | tuple[Plan, ...] | tuple[Point, ...] | ServingPlan | ProgramPlan:
    """Plan the training of a model on some hardware: find the best mesh and the best strategy to run it.

    With `serve`, plan a server: `plan("llama3-8b", "v5e:8", serve="decode", batch=64)` returns the best `ServingPlan`.

    With a function in place of a model, plan your own JAX program: `plan(step, state, batch, on="v5e:4x4")`. The dims
    of its arrays are found by tracing, the best layouts are compiled, and the fastest is returned as a `ProgramPlan`,
    whose `apply()` returns the function in that layout.

    Args:
        model: a preset's name (`llama3-8b`), the path of a Hugging Face config.json, a ModelConfig or a Workload; or
            the path of a plan file, which is read and returned; or a function that JAX traces.
        args: the arguments of a function, arrays or `jax.ShapeDtypeStruct`s. For a model: the hardware, instead of
            `on`.
        on: the hardware, such as `v5p:4x4x4`, `h100:64` or `cpu:8`, or a System.
        mesh: plan this mesh, `fsdp=-1,tp=4` or a MeshShape, instead of the best.
        compare: plan these meshes instead of the best, and return their plans in this order.
        compare_systems: plan the best mesh on `on` and on each of these systems, and return the plans in this order.
        sweep: plan the best mesh for each of several values, `chips=64..1024`, `batch=96,192` or `seq_len=2k..32k`, and
            return a `Point` for each: the value, and the record of its best mesh or the reason why there is none.
        top: how many meshes to rank (default 8); those after the best are `Plan.alternatives`.
        strategy: run the mesh with exactly this strategy; requires mesh.
        tokens: also compute the time and cost of training on this many tokens, such as `15T`, in `Plan.training_run`.
        price: the price of a chip-hour, for the cost of the training; requires tokens.
        serve: plan a server's phase, `decode` or `prefill`; its options are `ServingOptions`, mesh and cache (how the
            KV cache is split).
        options: the workload (`WorkloadOptions`), such as seq_len, remat and dtype, with either batch (in sequences) or
            batch_tokens; single fields of the strategy (`StrategyOptions`); framework; include_planned. For a function,
            its arguments by name, and num_compiled: how many of its best layouts are compiled (default 3; 0 for none).

    Raises:
        MeshwrightError: no mesh is legal, a name is unknown, a value has the wrong type, or an option has no effect
            together with another.

    >>> plan("llama3-8b", on="v5p:4x4x4", batch=512, mesh="fsdp=64").mesh
    MeshShape(dp=1, fsdp=64, tp=1, sp=1, ep=1, pp=1)
    """
    single = {"mesh": mesh, "top": top, "strategy": strategy, "tokens": tokens, "price": price}
    named = {"compare": compare, "compare_systems": compare_systems, "sweep": sweep, **single}
    named = {name: value for name, value in named.items() if value is not None}
    if callable(model):
        return _plan_function(model, args, on, named | ({} if serve is None else {"serve": serve}), options)
    for beside in args:
        if on is not None:
            raise MeshwrightError(
                f"beside a model there is its hardware alone, as on='v5p:4x4x4'; {beside!r} is too many"
            )
        on = beside
    check_model(model)
    if serve is not None:
        if isinstance(model, Workload):
            raise MeshwrightError("a Workload is training; with serve give its model")
        _refuse(named.keys() - {"mesh"}, f"with serve={serve!r}")
        return plan_server(model, serve, {"on": on, "mesh": mesh, **options})
    said = given({"on": on, **options}, ("on", *SearchOptions.__annotations__))
    if isinstance(model, str | Path) and (kept := _plan_in_file(model, named | said)) is not None:
        return kept
    return _plan_training(model, named, said)


def _plan_training(
    model: ModelLike, named: Mapping[str, Any], said: dict[str, Any]
) -> Plan | tuple[Plan, ...] | tuple[Point, ...]:
    """Plan the training of a model. named, said: the arguments and the options of `plan` that are set."""
    for mode in ("sweep", "compare", "compare_systems"):
        if mode in named:
            _refuse(named.keys() - {mode}, f"with {mode}")
    if "price" in named and "tokens" not in named:
        _refuse(("price",), "without tokens")
    swept = read_sweep(named["sweep"]) if "sweep" in named else None
    if swept is not None:
        _refuse(_only(said, swept.replaced), "with sweep")
        if not isinstance(model, Workload):
            said = swept_options(swept, said)
    framework = said.pop("framework", None)
    include_planned = said.pop("include_planned", False) or framework is not None
    if "compare_systems" in named:
        check_value("compare_systems", named["compare_systems"], Sequence[SystemLike])
        return plan_systems(model, (said["on"], *named["compare_systems"]), _only(said, WORKLOAD_OPTIONS),
                            _only(said, STRATEGY_OPTIONS), framework=framework,
                            include_planned=include_planned)  # fmt: skip
    workload, system = read_workload(model, _only(said, WORKLOAD_OPTIONS))
    fields = framework_fields(framework, system.chip.kind)
    fields |= read_strategy(_only(said, STRATEGY_OPTIONS), system.num_devices)
    policies = (workload.remat,) if isinstance(model, Workload) else remats(said.get("remat"))

    def find(workload: Workload, system: System, top: int) -> Ranking:
        return find_meshes(workload, system, policies, fields, top=top, include_planned=include_planned)

    def of_mesh(mesh: MeshShape) -> Plan:
        return plan_one_mesh(workload, mesh, system, policies, fields, include_planned=include_planned)

    if swept is not None:
        return run_sweep(swept, workload, system, lambda workload, system: find(workload, system, 1).plans[0])
    if "compare" in named:
        return tuple(map(of_mesh, read_compared(named["compare"], system.num_devices)))
    strategy: Strategy | None = named.get("strategy")
    if strategy is not None and ("mesh" not in named or fields):
        wrong = f"{next(iter(fields))} beside it says it twice" if fields else "give mesh too, or single fields of it"
        raise MeshwrightError(f"strategy says how one mesh is run; {wrong}")
    if "mesh" not in named:
        ranking = find(workload, system, read_count("top", named.get("top", 8)))
        found = replace(ranking.plans[0], alternatives=ranking.plans[1:])
    else:
        shape = read_mesh(named["mesh"], system.num_devices)
        found = of_mesh(shape) if strategy is None else make_plan(workload, shape, system, strategy)
    if "tokens" not in named:
        return found
    cost = read_price(named["price"]) if "price" in named else None
    tokens = read_count("tokens", named["tokens"])
    return replace(found, training_run=training_run(found.predicted, system.num_chips, tokens, cost))


def plan_server(model: str | Path | ModelConfig, phase: ServingPhase, options: Mapping[str, Any]) -> ServingPlan:
    """Return the best plan to serve a model. options: `ServingOptions`, mesh and cache.

    Raises:
        MeshwrightError: an option is unknown or wrong, or no layout is legal.
    """
    said = given(options, (*SERVING_OPTIONS, "mesh", "cache"))
    own = _only(said, SERVING_OPTIONS)
    return best_serving_plan(model, phase, own, mesh=said.get("mesh"), cache=said.get("cache"))


def plan_systems(
    model: ModelLike,
    systems: Sequence[SystemLike],
    workload: Mapping[str, Any],
    strategy: Mapping[str, Any],
    *,
    framework: str | None,
    include_planned: bool,
) -> tuple[Plan, ...]:
    """Return the best plan of a model on each of several systems, in their order.

    Args:
        model: as in `plan`.
        systems: the systems, such as `v5p:4x4x4`.
        workload: `WorkloadOptions`, without the system.
        strategy: `StrategyOptions`.
        framework: the framework that runs the steps; None for meshwright.
        include_planned: include plans that `meshwright train` cannot run, such as those of another framework.

    Raises:
        MeshwrightError: a system is given twice.
    """
    found: list[Plan] = []
    for on in systems:
        read, system = read_workload(model, {**workload, "on": on})
        if any(plan.hardware == str(system) for plan in found):
            raise MeshwrightError(f"compare_systems has {system} twice; leave one out")
        fields = framework_fields(framework, system.chip.kind) | read_strategy(strategy, system.num_devices)
        policies = (read.remat,) if isinstance(model, Workload) else remats(workload.get("remat"))
        ranking = find_meshes(read, system, policies, fields, top=1, include_planned=include_planned)
        found.append(ranking.plans[0])
    return tuple(found)


def _plan_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    on: SystemLike | None,
    named: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ProgramPlan:
    """Return the plan of a JAX function with these arguments.

    named: the other arguments of `plan` that are set, by name; only mesh is allowed. options: num_compiled, and the
    keyword arguments of the function.
    """
    from meshwright.proof.program_plans.plan import plan_program

    name = getattr(function, "__name__", type(function).__name__)
    if on is None or not (args or options):
        missing = "on='v5e:4x4', the hardware" if on is None else "its arguments"
        raise MeshwrightError(f"{name} is planned with {missing}: mw.plan({name}, state, batch, on='v5e:4x4')")
    if wrong := sorted(named.keys() - {"mesh"}):
        raise MeshwrightError(f"{wrong[0]} is for models; of a function give mesh or num_compiled")
    return plan_program(function, *args, on=on, mesh=named.get("mesh"), **options)


def _plan_in_file(path: str | Path, others: Mapping[str, Any]) -> Plan | None:
    """Return the plan in a plan file; None if `path` is a model name or another file.

    others: the other arguments of `plan`. Raises if there are any for a plan file, or if `path` is a run directory.
    """
    if is_run_directory(path):
        raise MeshwrightError(f"{path} is the directory of a run; mw.verify({str(path)!r}).plan is its plan")
    if not is_plan_file(path):
        return None
    if others:
        raise MeshwrightError(f"{path} is a plan, which sets {next(iter(others))}=… itself; leave it out")
    return read_plan(Path(path))


def _refuse(names: Iterable[str], where: str) -> None:
    """Raise if there are any `names` of options without effect. where: the end of the message, as `with sweep`."""
    for name in sorted(names):
        raise MeshwrightError(f"{name} has no effect {where}; leave it out")


def find_meshes(
    workload: Workload,
    system: System,
    policies: tuple[Remat, ...],
    fields: Mapping[str, Any],
    *,
    top: int = 8,
    include_planned: bool = False,
) -> Ranking:
    """Return the best meshes that `meshwright train` can run, each with its best strategy.

    Of plans that tie with the best, the one with the simplest mesh is first.

    Args:
        workload, system: what to plan.
        policies: the remat policies to choose from; empty for all.
        fields: values of strategy fields that are not searched.
        top: how many meshes to return.
        include_planned: also search plans that `meshwright train` cannot run yet. If it can run none, all are searched.

    Raises:
        MeshwrightError: `fields` has a field that the planner always chooses, or a `reference_mesh` although the step
            has no reference model.
    """
    if chosen := [name for name in ALWAYS_CHOSEN if name in fields]:
        option = f"--{chosen[0].replace('_', '-')} ({chosen[0]}=…)"
        raise MeshwrightError(f"{option} goes with --mesh (mesh=…); without a mesh the planner chooses it")
    if "reference_mesh" in fields and not has_reference(workload):
        raise MeshwrightError("reference_mesh is of the frozen model of objective='dpo', which this step runs none of")
    space = _space(workload, system, policies, fields, include_planned=include_planned)
    ranking = rank_space(space, top=max(top, LEAST_RANKED), most_tied=MOST_TIED)
    plans, num_tied = simplest_first(ranking.plans)
    return replace(ranking, plans=plans[:top], num_tied=min(num_tied, top))


def find_beyond(best: Plan, policies: tuple[Remat, ...], fields: Mapping[str, Any]) -> Plan | None:
    """Return the best plan that `meshwright train` cannot run yet; None if it is not better than `best`.

    It is better if it is faster, or if it fits in memory and `best` does not. policies, fields: as in `find_meshes`.
    """
    seconds = best.predicted.step_seconds if best.predicted.fits else None
    found = find_faster(best.workload, best.system, math.inf if seconds is None else seconds, remats=policies, **fields)
    return found if found and found.planned_only else None


def plan_one_mesh(
    workload: Workload,
    mesh: MeshShape,
    system: System,
    policies: tuple[Remat, ...],
    fields: Mapping[str, Any],
    *,
    include_planned: bool = False,
) -> Plan:
    """Return the fastest plan of one mesh among the strategies that `meshwright train` can run; if none can, among all.

    Arguments are as in `find_meshes`.

    Raises:
        MeshwrightError: no strategy is possible.
    """
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
    """Return the search space of plans that `meshwright train` can run; if there is no such plan, that of all plans.

    mesh: the only mesh to plan; None for all. include_planned: return the space of all plans in any case.
    """
    if not include_planned:
        try:
            space = runnable_space(workload, system, policies, **fields)
        except MeshwrightError:  # Nothing runs the model yet; `Plan.planned_only` says why.
            pass
        else:
            if space.runs(mesh) if mesh is not None else any(map(space.parts, space.meshes())):
                return space
    return whole_space(workload, system, policies, **fields)


def plan_to_run(what: PlanLike, options: Mapping[str, Any]) -> Plan:
    """Return the plan that `verify` or `train` runs, from a plan, a plan file, or a model.

    options: `PlanOptions`; with a plan, only those of the strategy (`StrategyOptions`) and param_dtype.

    Raises:
        MeshwrightError: the plan cannot run, or `options` repeat what a given plan already sets.
    """
    said = given(options, PlanOptions.__annotations__)
    changes = {name: said.pop(name) for name in (*STRATEGY_OPTIONS, "param_dtype") if name in said}
    if isinstance(what, (str, Path)) and is_plan_file(what):
        what = read_plan(Path(what))
    if isinstance(what, Plan):
        if said:
            named = ", ".join(f"--{name.replace('_', '-')} ({name}=…)" for name in said)
            raise MeshwrightError(f"a plan sets {named} itself; leave it out")
        return run_as(as_run(what), changes)
    mesh = said.pop("mesh", None)
    workload, system = read_workload(what, said)
    if mesh is not None:
        shape = read_mesh(mesh, system.num_devices)
        if shape.pp > 1:
            found = plan_stages(workload, shape, system)
        else:
            found = make_plan(workload, shape, system, run_strategy(workload, shape, system))
    else:
        policies = REMATS if said.get("remat") == "auto" else (workload.remat,)
        found = find_meshes(workload, system, policies, {}, top=1).plans[0]
    return run_as(as_run(found), changes)


def run_as(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Return a plan with other values of strategy options or of param_dtype. Raises if the result cannot run."""
    if not changes:
        return plan
    fields = {name: value for name, value in changes.items() if name != "param_dtype"}
    said = read_strategy(fields, plan.system.num_devices)
    if said.get("sp_method", "gather") != "gather":
        said.setdefault("attention", "flash")
    workload = replace(plan.workload, param_dtype=changes.get("param_dtype", plan.workload.param_dtype))
    return as_run(make_plan(workload, plan.mesh, plan.system, replace(plan.strategy, **said)))


def _only(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options with these names."""
    return {name: value for name, value in options.items() if name in names}
