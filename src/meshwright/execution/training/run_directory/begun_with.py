"""Check that a run was started with the model or plan of a command, if one command both starts and resumes a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.pretrained import find_pretrained
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.planning.library import PlanLike, plan_to_run
from meshwright.planning.options import STRATEGY_OPTIONS, read_model
from meshwright.planning.plan import Plan, is_plan_file


def check_begun_with(what: PlanLike, options: Mapping[str, Any], before: RunConfig, directory: Path) -> dict[str, Any]:
    """Raise a `MeshwrightError` if a run was started with another model or other weights than those of a command.

    Args:
        what: the model or plan of the command.
        options: the options of the command, by name.
        before: the config of the run.

    Returns:
        The options that the caller must still compare with the run's: the rest of `options`, and those of a plan.
    """
    options = dict(options)
    source = find_pretrained(what, options.pop("weights", None), from_scratch=options.pop("from_scratch", False))
    adapter = options.pop("adapter", None)
    begun_with = source._asdict() | {"adapter": adapter and Path(adapter).absolute()}
    for name, path in begun_with.items():
        now, then = path and str(path), getattr(before, name)
        if now != then:
            raise MeshwrightError(
                f"{name} is {now or 'none'}; {directory} was begun with {then or 'none'}, and only a new run can have"
                " another"
            )
    if options.get("remat") == "auto":  # The run keeps the remat policy that the planner chose when it started.
        del options["remat"]
    if isinstance(what, Plan) or (isinstance(what, (str, Path)) and is_plan_file(what)):
        plan = plan_to_run(what, {})
        model, options = plan.workload.model, _of_workload(plan.workload) | options
        if plan.mesh == before.mesh:  # On another mesh only the run's own strategy may be valid.
            strategy = {name: getattr(plan.strategy, name) for name in STRATEGY_OPTIONS}
            options = {name: value for name, value in strategy.items() if value is not None} | options
    elif isinstance(what, Workload):
        model, options = what.model, _of_workload(what) | options
    else:
        # Adapters are among the remaining options.
        model = replace(read_model(what, options.pop("num_layers", None)), lora=before.workload.config.lora)
    ours = before.workload.model
    if model != ours:
        names = [name for name in vars(ours) if getattr(model, name, None) != getattr(ours, name)]
        differ = "; ".join(
            f"{name} is {getattr(ours, name)!r} there, {getattr(model, name, None)!r} here" for name in names
        )
        raise MeshwrightError(f"{directory} is a run of another model than {model.name}: {differ}; -o starts another")
    return options


def _of_workload(workload: Workload) -> dict[str, Any]:
    """Return the options that a workload determines, by name."""
    return {
        "batch": workload.batch,
        "seq_len": workload.seq_len,
        "dtype": workload.compute_dtype,
        "param_dtype": workload.param_dtype,
        "remat": workload.remat,
    }
