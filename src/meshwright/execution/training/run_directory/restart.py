"""Start and resume a run: find its last complete checkpoint, restore the state, report what a stopped run left."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.interrupt import Interruption
from meshwright.execution.training.preference.inputs import FOLDER
from meshwright.execution.training.pretrained import PRETRAINED, copy_pretrained_files
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.execution.training.run_directory.compatible import (
    check_allowed,
    config_differences,
    identity_differences,
    other_settings,
)
from meshwright.execution.training.run_directory.frozen import abstract_parts, saved_parts, with_frozen
from meshwright.execution.training.run_directory.resolved import write_resolved
from meshwright.execution.training.run_directory.run import (
    NotFiniteError,
    Row,
    RunConfig,
    RunStoppedError,
    begin_run,
    config_from_data,
    read_config,
    read_metrics,
    repair_lines,
)
from meshwright.execution.training.slots import in_order, move_to_stage_layout, to_order
from meshwright.execution.training.step import State, abstract_state, initial_state
from meshwright.execution.training.update.bad_steps import keep_bad_steps
from meshwright.execution.training.update.skipping import is_schedule
from meshwright.execution.training.update.transformation import transformation
from meshwright.execution.training.watch.goodput import note_restart

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def is_first_process() -> bool:
    """Whether this process writes and prints for all processes of the run."""
    return jax.process_index() == 0


def last_step(
    config: RunConfig, directory: Path, checkpoints: Checkpoints, on_note: Note, *, allow: Collection[str] = ()
) -> int:
    """Return the step of the last complete checkpoint, 0 if there is none.

    Args:
        allow: kinds of differences to accept (`compatible.ALLOWED`).

    Raises:
        MeshwrightError: the config in the checkpoint differs, and the difference is not allowed.
    """

    def check(start: int) -> list[str]:
        try:
            differences = config_differences(config, before := checkpoints.config(start))
            kept = other_settings(read_config(directory), before)
        except MeshwrightError as error:
            raise MeshwrightError(
                f"checkpoint {start} of {directory} was written by another version of meshwright: {error}"
            ) from None
        where = f"{directory} cannot continue from checkpoint {start}"
        return [*check_allowed(differences, allow, where), *kept]

    return last_checkpoint(directory, checkpoints, config.steps, on_note, check, more="--steps {} would continue")


def last_checkpoint(
    directory: Path,
    checkpoints: Checkpoints,
    steps: int,
    on_note: Note,
    check: Callable[[int], list[str]],
    *,
    more: str,
) -> int:
    """Return the step of the last complete checkpoint, 0 if there is none. Notes say how the run continues.

    Args:
        steps: the total number of steps of the run.
        check: raises if the run cannot continue from the checkpoint of this step; returns lines for the user.
        more: the advice for continuing a finished run, a format string that takes the number of steps.
    """
    recorded: list[int] = []
    if is_first_process():
        repair_lines(directory, on_note)
        recorded = [row["step"] for row in read_metrics(directory)]
    rows = max(recorded, default=-1) + 1
    if (start := checkpoints.whole(on_note)) is None:
        if rows:
            on_note(f"{directory} has no checkpoint: its {rows} steps are taken again, from the first")
        return 0
    for line in check(start):
        on_note(line)
    if is_first_process() and (lost := start - sum(step < start for step in recorded)):
        on_note(f"{directory / 'metrics.jsonl'} has lost {lost} of the {start} steps that were taken")
    if start > steps:
        on_note(f"{directory} has taken {start} steps, more than the {steps} it is to have: none is taken")
    elif start == steps:
        on_note(f"{directory} is finished: it has taken {start} steps; {more.format(2 * start)}")
    elif rows > start:
        on_note(f"{directory} continues from checkpoint {start}: steps {start + 1} to {rows} are taken again")
    return start


def check_identity(
    identity: Mapping[str, str],
    directory: Path,
    checkpoints: Checkpoints,
    start: int,
    on_note: Note,
    *,
    allow: Collection[str],
) -> None:
    """Raise a `MeshwrightError` if the data or tokenizer differ from the checkpoint's and that is not allowed.

    Args:
        identity: the run's checksums, {"data" or "tokenizer": checksum}.
        start: the step of the checkpoint; 0 for none.
        on_note: called with a line for each allowed difference.
        allow: kinds of differences to accept (`compatible.ALLOWED`).
    """
    if start:
        differences = identity_differences(identity, checkpoints.about(start, "identity"))
        for line in check_allowed(differences, allow, f"{directory} cannot continue from checkpoint {start}"):
            on_note(line)


def begin(config: RunConfig, directory: Path, checkpoints: Checkpoints, start: int, first: Row, on_note: Note) -> None:
    """Write the files of a run after the first step of this process, and rename damaged checkpoints of later steps.

    Args:
        start: number of steps that earlier processes took.
        first: the row of this step.
    """
    if not is_first_process():
        return
    copy_pretrained_files(config, directory)
    begin_directory(config, directory, checkpoints, start, first, on_note)
    write_resolved(directory, config)


def begin_directory(
    config: DataclassInstance, directory: Path, checkpoints: Checkpoints, start: int, first: Row, on_note: Note
) -> None:
    """Do the part of `begin` that applies to runs of `meshwright.fit` too. Only the first process calls it."""
    note_restart(directory, read_metrics(directory), start, first)
    begin_run(directory, config, start)
    keep_bad_steps(directory, start)
    checkpoints.clean()
    for step in checkpoints.steps:
        if step > start:
            on_note(f"checkpoint {step} is kept as {checkpoints.set_aside(step, 'damaged').name}")


def end_failed_start(directory: Path, start: int) -> None:
    """Delete the files of a new run (`start` is 0) that failed in its first step, without a checkpoint."""
    if not is_first_process() or start or Checkpoints(directory).steps or len(read_metrics(directory)) > 1:
        return
    for name in ("config.json", "metrics.jsonl", "resolved.yaml"):
        (directory / name).unlink(missing_ok=True)
    for folder in (PRETRAINED, FOLDER):
        shutil.rmtree(directory / folder, ignore_errors=True)


def what_is_left(config: RunConfig, directory: Path, how: str = "--resume") -> str:
    """Return a text for errors: the last checkpoint of a stopped run, and the command that continues from it.

    how: the options with which the command continues the run.
    """
    hint = "" if config.saving.every else " (--save-every N, or a time as 30m, writes some on the way)"
    return describe_left(directory, f"`meshwright train {shlex.quote(str(directory))} {how}`", hint)


def describe_left(directory: Path, how: str, hint: str) -> str:
    """Return a text for errors: the last checkpoint of a stopped run, and how to continue from it.

    Args:
        how: the command or call that continues the run.
        hint: added if there is no checkpoint.
    """
    if not (steps := Checkpoints(directory).steps):
        return f"no checkpoint was written{hint}"
    return f"the last checkpoint is {directory / 'checkpoints' / str(steps[-1])}; {how} continues from it"


@contextmanager
def stopped_run_errors(
    directory: Path, start: int, interruption: Interruption, left: Callable[[bool], str]
) -> Iterator[None]:
    """Inside the context, errors of a started run become RunStoppedErrors, which name its last checkpoint.

    A MeshwrightError before the first step is not converted.

    Args:
        start: steps taken before the run was started or resumed.
        interruption: tells whether the first step was taken.
        left: returns a text on the last checkpoint; its argument is whether the run ended because of NaN.
    """
    try:
        yield
    except NotFiniteError as error:
        raise RunStoppedError(f"{error}; {left(True)}") from None
    except MeshwrightError as error:
        if not interruption.has_begun:
            raise
        end_failed_start(directory, start)
        raise RunStoppedError(f"{error}; training stops; {left(False)}") from None
    except jax.errors.JaxRuntimeError as error:
        if "Gloo context initialization failed" in str(error):
            # XLA:CPU waits 30 s for the other processes at the first collective among them.
            raise RunStoppedError(
                f"the processes did not reach each other within 30 s: one is gone, or its machine is overloaded;"
                f" training stops; {left(False)}"
            ) from None
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise RunStoppedError(f"the devices are out of memory: {str(error).splitlines()[0][:200]}") from None


def first_state(
    config: RunConfig,
    layout: ShardingContext,
    mesh: Mesh,
    checkpoints: Checkpoints,
    start: int,
    on_bytes: Callable[[int], None],
) -> State:
    """Return the state after `start` steps: the initial state for 0, else that of the checkpoint."""
    if start == 0:
        weights = Path(config.weights) if config.weights else None
        return initial_state(
            config.workload, layout, config.optimizer, mesh, config.strategy,
            seed=config.seed, weights=weights, adapter=Path(config.adapter) if config.adapter else None,
            on_bytes=on_bytes,
        )  # fmt: skip
    wanted = abstract_state(config.workload, layout, config.optimizer, mesh, config.strategy)
    saved = in_order(layout, config.workload.config, config.strategy)
    kept = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    state = _restored(config, kept, saved, mesh, checkpoints, start)
    state = with_frozen(config, state, layout, mesh, config.strategy, on_bytes)
    if saved == layout:
        return state
    return move_to_stage_layout(state, wanted, config.workload.config, layout, config.strategy)


def _restored(
    config: RunConfig, kept: State, layout: ShardingContext, mesh: Mesh, checkpoints: Checkpoints, start: int
) -> State:
    """Return the state in the checkpoint of step `start`, which has no frozen parameters.

    kept: the abstract state, whose shapes, dtypes and shardings the arrays get.

    Dtypes and the optimizer may differ from the checkpoint's. If only the checkpoint has float32 copies of parameters,
    parameters are read from them; if only the state has, they are read from the parameters. Moments of another
    optimizer are not read: the new one starts with initial moments, at the current point of the learning-rate schedule.
    """
    before = config_from_data(checkpoints.config(start))
    wanted, source = abstract_parts(config, kept, mesh), {}
    had_master = before.strategy.master_weights and before.workload.param_dtype != "f32"
    if had_master and "master" not in wanted:
        source["params"] = "master"
    elif "master" in wanted and not had_master:
        source["master"] = "params"
    if before.strategy.optimizer == config.strategy.optimizer:
        return checkpoints.restore(start, wanted, source=source)
    found = checkpoints.restore(
        start, {name: part for name, part in wanted.items() if name != "optimizer"}, source=source
    )

    def begin(stored: Any) -> Any:
        moments = transformation(config.optimizer, config.workload, layout, config.strategy).init(stored)
        placed = jax.tree.map(
            lambda array, to: jax.reshard(array.astype(to.dtype), to.sharding.spec), moments, wanted["optimizer"]
        )
        return jax.tree.map(
            lambda node: node._replace(count=jnp.full_like(node.count, start)) if is_schedule(node) else node,
            placed,
            is_leaf=is_schedule,
        )

    return found | {"optimizer": jax.jit(begin)(found.get("master", found["params"]))}


def order_of_checkpoints(config: RunConfig, layout: ShardingContext, mesh: Mesh) -> Callable[[State], State]:
    """Return a function that converts a training state to that of a checkpoint: layers in model order, no padding.

    Frozen parameters are replaced by their fingerprints (`frozen.saved_parts`).
    """
    if (saved := in_order(layout, config.workload.config, config.strategy)) == layout:
        return partial(saved_parts, config)
    wanted = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    order = jax.jit(lambda state: to_order(state, wanted, config.workload.config, layout, config.strategy))
    return lambda state: saved_parts(config, order(state))
