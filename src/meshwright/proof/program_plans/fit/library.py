"""`meshwright.fit`: train with any step function for a number of steps, or resume such a run."""

from __future__ import annotations

import functools
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.execution.processes import member
from meshwright.execution.training.interrupt import interruptions
from meshwright.execution.training.run_directory.lock import RunLock
from meshwright.execution.training.run_directory.restart import is_first_process
from meshwright.execution.training.run_directory.run import Row, RunStoppedError, read_metrics
from meshwright.execution.training.run_directory.saving import Saving, read_save_every
from meshwright.execution.training.run_record import measured_steps
from meshwright.options.values import Count, read_count
from meshwright.proof.program_plans.fit.batches import Batches
from meshwright.proof.program_plans.fit.config import FitConfig, read_fit_config
from meshwright.proof.program_plans.fit.loop import left_on_disk, run_steps
from meshwright.proof.program_plans.fit.step import FitStep, is_maker, lay_out
from meshwright.proof.program_plans.plan import ProgramPlan
from meshwright.proof.programs.apply import Applied
from meshwright.proof.programs.arrays import Tree, only_arrays
from meshwright.proof.programs.classes import table_by_name
from meshwright.record import Record
from meshwright.support.extras import require_extra


@dataclass(frozen=True)
class Fit:
    """A finished run: its last state, one row of metrics per step, the measured record, and its directory."""

    state: Any = field(repr=False)
    rows: Sequence[Row] = field(repr=False)
    record: Record
    directory: Path


def fit(
    step: Callable[..., Any],
    state: Any,
    batches: Batches,
    *,
    plan: ProgramPlan | Applied,
    out: str | Path,
    steps: Count,
    save_every: Count | None = None,
    keep: int = 2,
    resume: bool = False,
    on_step: Callable[[Row], None] = lambda row: None,
) -> Fit:
    """Train with any JAX step, with the run directory, checkpoints and report of `meshwright train`.

    With several processes (`meshwright launch -n 4 --on cpu:8 -- script.py`, or `jax.distributed.initialize`), all
    processes make the same call, with the same directory.

    Args:
        step: a function (state, batch) -> (state, metrics), jitted or not; if it has further arguments, a batch is the
            tuple of all arguments after the state. Metrics are a scalar, the loss, or a dict of scalars; the run stops
            when its `loss` or `grad_norm` is NaN or infinite.
        state: a pytree of arrays, which is copied; other leaves are allowed, as in Equinox modules. Or a function
            without arguments that returns it: it is compiled for the mesh, so that no device holds a large state whole.
        batches: an iterable of trees of NumPy arrays, or a function that returns the batch of a step, counted from 0.
            With several processes, each yields the rows of its own devices, or all rows. A resumed run skips the
            batches already used, unless the iterator has `get_state` and `set_state`, as grain's have.
        plan: the plan of the step by `meshwright.plan`, for devices of this process; or the result of
            `meshwright.apply`.
        out: directory for the run's config, metrics and checkpoints.
        steps: total number of steps of the run, including steps before it was resumed.
        save_every: steps between checkpoints, as 500, or a time, as 30m, the default; 0 for the last step only.
        keep: number of recent checkpoints to keep.
        resume: continue from the last complete checkpoint in `out`, also on another mesh; start a new run if there is
            none.
        on_step: called with the row of each step.

    Raises:
        MeshwrightError: the run cannot start; the message names the difference from the plan.
        RunStoppedError: the run had started and could not continue; or a signal (SIGINT, SIGTERM, SIGHUP) stopped it,
            after the current step and a checkpoint.
    """
    require_extra("fit", "train")
    count, directory = read_count("steps", steps), Path(out)
    every: dict[str, Any] = {} if save_every is None else read_save_every(save_every)
    saving = Saving(keep=keep, **every)
    _check_directory(directory, resume=resume)
    if isinstance(plan, ProgramPlan):
        _check_devices(plan)
    is_module = isinstance(plan, ProgramPlan | Applied) and plan.program.returned.others and not is_maker(state)
    whole = Tree.of(state) if is_module else None
    if whole is not None:
        # A module of Equinox: its arrays are the state, and the step is given the whole module.
        step, state = step_of_arrays(step, whole), only_arrays(state)
    laid = lay_out(step, state, plan)
    config = _config(step, laid, plan if isinstance(plan, ProgramPlan) else None, count, saving)
    lock = RunLock(directory, warnings.warn) if is_first_process() else None
    several = member.of_script

    def tell_step(row: Row) -> None:
        if several is not None:
            several.step = row["step"] + 1
        on_step(row)

    try:
        if several is not None:
            several.directory = directory
        with interruptions(warnings.warn, None, grace_seconds=saving.grace_seconds) as interruption:
            last, taken = run_steps(config, laid, state, batches, directory, interruption, tell_step, warnings.warn)
    finally:
        if several is not None:
            several.step = None
        if lock is not None:
            lock.release()
    if interruption.stop is not None and taken < count:
        name = signal.Signals(interruption.stop).name
        left = left_on_disk(config, directory)
        raise RunStoppedError(f"stopped by {name} after {taken} of {count} steps; {left}", interruption.stop)
    rows = read_metrics(directory)
    here = [row for row in rows if (row["mesh"], row["hardware"]) == (config.mesh_text, config.hardware)]
    final = laid.tree(last) if whole is None else whole.whole(jax.tree.leaves(laid.tree(last)))
    return Fit(final, rows, measured_steps(here, config.mesh, config.hardware), directory)


def step_of_arrays(step: Callable[..., Any], whole: Tree) -> Callable[..., Any]:
    """Return the step as a function that takes and returns only the arrays of the state.

    whole: the structure of the state, with the leaves that are not arrays.
    """

    @functools.wraps(step, updated=())
    def bare(state: Any, *parts: Any) -> tuple[Any, Any]:
        after, metrics = step(whole.whole(jax.tree.leaves(state)), *parts)
        return only_arrays(after), metrics

    return bare


def _check_directory(directory: Path, *, resume: bool) -> None:
    """Raise if a directory has a run and `resume` is off, or a run of another command."""
    found = [name for name in ("config.json", "checkpoints", "metrics.jsonl") if (directory / name).exists()]
    if found and not resume:
        raise MeshwrightError(f"{directory} holds a run; resume=True continues with it, another out= starts another")
    if "config.json" in found and read_fit_config(directory) is None:
        raise MeshwrightError(f"{directory} holds a config.json that is not of a run of fit; give another out=")


def _check_devices(plan: ProgramPlan) -> None:
    """Raise if this process does not have the devices of a plan."""
    system = plan.system
    if (count := sum(one.platform == system.chip.kind for one in jax.devices())) >= system.num_devices:
        return
    here = f"{jax.device_count()} {jax.devices()[0].platform} devices"
    simulated = f" (XLA_FLAGS=--xla_force_host_platform_device_count={system.num_devices} simulates them)"
    raise MeshwrightError(
        f"the plan is for {system}, and JAX has {here} here"
        f"{simulated if system.chip.kind == 'cpu' and count else '; fit takes plan.apply(), for devices that are here'}"
    )


def _config(step: Any, laid: FitStep, plan: ProgramPlan | None, steps: int, saving: Saving) -> FitConfig:
    """Return the config of a run. plan: None if a table gave the step's layout."""
    layout, program, device = laid.applied.layout, laid.applied.program, laid.mesh.devices.flat[0]
    config = FitConfig(
        program=getattr(step, "__name__", "") or program.traced.fun_name,
        steps=steps,
        saving=saving,
        mesh=dict(laid.mesh.shape),
        hardware=f"{device.device_kind}:{laid.mesh.size}",
        table={name: [*axes] for name, axes in table_by_name(laid.applied.classes, layout.table).items()},
        store=layout.store,
        metrics=laid.metrics,
    )
    if plan is None:
        return config
    usable = plan.system.usable_bytes if plan.system.chip.kind != "cpu" else None
    return replace(config, hardware=str(plan.system), predicted=plan.predicted, usable_bytes=usable)
