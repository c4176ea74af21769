"""`meshwright.verify`: compare a plan, given as text or as an object, with the compiled program."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack, overload

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serving import CacheSplit, ServingPhase
from meshwright.errors import MeshwrightError
from meshwright.execution.training.run_directory.run import read_config, read_metrics
from meshwright.execution.training.run_record import measured
from meshwright.execution.training.watch.profile import find_profile
from meshwright.options.given import given
from meshwright.options.keywords import PlanOptions, ServingOptions
from meshwright.options.values import MeshLike
from meshwright.planning.files import is_run_directory
from meshwright.planning.library import PlanLike, plan_server, plan_to_run
from meshwright.planning.plan import Plan
from meshwright.planning.serving.plan import ServingPlan, is_serving_plan_file, read_serving_plan
from meshwright.proof.compiler.targets import Effort
from meshwright.proof.verification.plans import Verification, verify_plan
from meshwright.proof.verification.serving import ServingVerification, verify_serving
from meshwright.record import Record


@overload
def verify(
    what: PlanLike,
    *,
    effort: Effort = "fast",
    run: str | Path | None = None,
    measured: Record | None = None,
    **options: Unpack[PlanOptions],
) -> Verification: ...


@overload
def verify(
    what: ServingPlan | str | Path | ModelConfig,
    *,
    serve: ServingPhase,
    effort: Effort = "fast",
    mesh: MeshLike | None = None,
    cache: CacheSplit | None = None,
    **options: Unpack[ServingOptions],
) -> ServingVerification: ...


def verify(
    what: Any,
    *,
    serve: ServingPhase | None = None,
    effort: Effort = "fast",
    run: str | Path | None = None,
    measured: Record | None = None,
    **options: Any,
) -> Verification | ServingVerification:
    """Compile a step with the compiler of its hardware, and compare it with its plan.

    Args:
        what: a plan or its file; a model's name or a ModelConfig, with at least `on` and `batch` among the options; or
            the directory of a run, whose measured record is then compared too.
        serve: the phase of a server, `decode` or `prefill`, whose step is compiled instead of a train step.
        effort: `fast` gives counts and bytes, `default` the schedule that will run (TPUs).
        run: the directory of a run of the same step.
        measured: the record of a run, instead of its directory.
        options: the workload, the mesh and how a step is run, as `meshwright.plan` takes them (`PlanOptions`); for a
            server `ServingOptions`, `mesh` and `cache` (how the cache is split). The planner chooses what is left out.

    Raises:
        MeshwrightError: where the compiler is not installed, the step cannot be run, or does not fit.
    """
    if serve is not None or isinstance(what, ServingPlan) or _is_serving_file(what):
        beside = {name: value for name, value in (("run", run), ("measured", measured)) if value is not None}
        return verify_serving(_serving_plan(what, serve, options | beside), effort=effort)
    plan, found = plan_and_measured(what, run, options)
    return verify_plan(plan, effort=effort, measured=measured or found)


def _is_serving_file(what: Any) -> bool:
    return isinstance(what, (str, Path)) and is_serving_plan_file(what)


def _serving_plan(what: Any, serve: ServingPhase | None, options: Mapping[str, Any]) -> ServingPlan:
    """Return the serving plan to verify: an object, a file, or the best plan for a model."""
    if not isinstance(what, ServingPlan) and not _is_serving_file(what):
        assert serve is not None
        return plan_server(what, serve, options)
    said = given(options, (*ServingOptions.__annotations__, "mesh", "cache"))
    plan = what if isinstance(what, ServingPlan) else read_serving_plan(Path(what))
    if said or serve not in (None, plan.serving.phase):
        name = next(iter(said), "serve")
        raise MeshwrightError(f"a serving plan sets its {name} itself; leave {name} out")
    return plan


def plan_and_measured(what: PlanLike, run: str | Path | None, options: Mapping[str, Any]) -> tuple[Plan, Record | None]:
    """Return the plan to verify and the measured record of a run; None without a run.

    Raises:
        MeshwrightError: `run` is given together with options that it determines, or the plan is not that of the run.
    """
    if isinstance(what, (str, Path)) and is_run_directory(what):
        if extra := list(given({**options, "run": run}, (*PlanOptions.__annotations__, "run"))):
            raise MeshwrightError(f"{what} is a run and sets {', '.join(extra)} itself; leave it out")
        return _read_run(Path(what))
    plan = plan_to_run(what, options)
    if run is None:
        return plan, None
    ran, record = _read_run(Path(run))
    for part in ("workload", "mesh", "hardware"):
        if getattr(ran, part) != getattr(plan, part):
            raise MeshwrightError(
                f"{run} is a run of another {part}; `meshwright verify {shlex.quote(str(run))}` is of its own"
            )
    return plan, record


def _read_run(directory: Path) -> tuple[Plan, Record]:
    """Return the plan of a run's step, and its measured record."""
    config = read_config(directory)
    return config.plan, measured(config, read_metrics(directory), find_profile(directory, config))
