"""Where a run starts and what an ended one leaves: its last whole checkpoint, the state there, its files."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.runtime import ShardingContext
from meshwright.training.checkpoint import Checkpoints, Note
from meshwright.training.frozen import abstract_parts, saved_parts, with_frozen
from meshwright.training.pretrained import KEPT, keep_files
from meshwright.training.resolved import write_resolved
from meshwright.training.resume import config_conflict
from meshwright.training.run import Row, RunConfig, begin_run, read_metrics
from meshwright.training.slots import in_order, to_order, to_stage_layout
from meshwright.training.step import State, abstract_state, initial_state
from meshwright.training.update.bad_steps import keep_bad_steps
from meshwright.training.watch import note_restart


def is_first_process() -> bool:
    """Whether this process writes and prints for all of a run's."""
    return jax.process_index() == 0


def last_step(config: RunConfig, directory: Path, checkpoints: Checkpoints, on_note: Note) -> int:
    """The steps taken at the last whole checkpoint, 0 where there is none; an error where the config is not its own."""
    rows = len(read_metrics(directory)) if is_first_process() else 0
    if (start := checkpoints.whole(on_note)) is None:
        if rows:
            on_note(f"{directory} has no checkpoint: its {rows} steps are taken again, from the first")
        return 0
    if conflict := config_conflict(config, checkpoints.config(start)):
        raise MeshwrightError(
            f"{directory} cannot go on from checkpoint {start}: {conflict}; put it back, or start a new run"
        )
    if start >= config.steps:
        on_note(f"{directory} is finished: it has taken {start} steps; --steps {2 * start} would go on")
    elif rows > start:
        on_note(f"{directory} goes on from checkpoint {start}: steps {start + 1} to {rows} are taken again")
    return start


def begin(config: RunConfig, directory: Path, checkpoints: Checkpoints, start: int, first: Row, on_note: Note) -> None:
    """Write what a run has after its first step; damaged checkpoints of later steps are put out of the way.

    first: the row of that step.
    """
    if not is_first_process():
        return
    keep_files(config, directory)
    note_restart(directory, read_metrics(directory), start, first)
    begin_run(directory, config, start)
    write_resolved(directory, config)
    keep_bad_steps(directory, start)
    checkpoints.clean()
    for step in checkpoints.steps:
        if step > start:
            on_note(f"checkpoint {step} is kept as {checkpoints.set_aside(step, 'damaged').name}")


def end_failed_start(directory: Path, start: int) -> None:
    """Delete what a new run wrote that failed before it had anything to go on from."""
    if not is_first_process() or start or Checkpoints(directory).steps or len(read_metrics(directory)) > 1:
        return
    for name in ("config.json", "metrics.jsonl", "resolved.yaml"):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / KEPT, ignore_errors=True)


def what_is_left(config: RunConfig, directory: Path, how: str = "--resume") -> str:
    """What is left of a run that had to stop, and what can be done with it."""
    steps = Checkpoints(directory).steps
    if not steps:
        return "no checkpoint was written" + ("" if config.saving.every else " (--save-every N writes some on the way)")
    return (
        f"the last checkpoint is {directory / 'checkpoints' / str(steps[-1])};"
        f" `meshwright train {shlex.quote(str(directory))} {how}` goes on from it"
    )


def first_state(
    config: RunConfig,
    layout: ShardingContext,
    mesh: Mesh,
    checkpoints: Checkpoints,
    start: int,
    on_bytes: Callable[[int], None],
) -> State:
    """The state after `start` steps."""
    if start == 0:
        weights = Path(config.weights) if config.weights else None
        return initial_state(
            config.workload, layout, config.optimizer, mesh, config.strategy,
            seed=config.seed, weights=weights, adapter=Path(config.adapter) if config.adapter else None,
            on_bytes=on_bytes,
        )  # fmt: skip
    wanted = abstract_state(config.workload, layout, config.optimizer, mesh, config.strategy)
    saved = _saved_layout(config, layout)
    kept = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    found = checkpoints.restore(start, abstract_parts(config, kept, mesh))
    state = with_frozen(config, found, layout, mesh, config.strategy, on_bytes)
    if saved == layout:
        return state
    return jax.jit(lambda state: to_stage_layout(state, wanted, config.workload.config, layout, config.strategy))(state)


def order_of_checkpoints(config: RunConfig, layout: ShardingContext, mesh: Mesh) -> Callable[[State], State]:
    """What makes of a state the one that checkpoints have, its layers in their order, so that any mesh reads it."""
    if (saved := _saved_layout(config, layout)) == layout:
        return partial(saved_parts, config)
    wanted = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    order = jax.jit(lambda state: to_order(state, wanted, config.workload.config, layout, config.strategy))
    return lambda state: saved_parts(config, order(state))


def _saved_layout(config: RunConfig, layout: ShardingContext) -> ShardingContext:
    """How a state lies while it is written and read."""
    return in_order(layout, config.workload.config, config.strategy)
