"""The training loop of `meshwright.fit`: run the remaining steps and record them in the run directory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.training.interrupt import Interruption
from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note, check_free
from meshwright.execution.training.run_directory.restart import (
    begin_directory,
    describe_left,
    is_first_process,
    last_checkpoint,
    stopped_run_errors,
)
from meshwright.execution.training.run_directory.run import NotFiniteError, Row
from meshwright.execution.training.run_directory.saver import Saver
from meshwright.execution.training.run_record import compiled_record
from meshwright.execution.training.stepping import take_steps
from meshwright.execution.training.update.bad_steps import FILE, BadSteps, log_bad_step
from meshwright.execution.training.watch.log import RunLog
from meshwright.execution.training.watch.shortfall import Shortfall
from meshwright.proof.program_plans.fit.batches import Batches, PlacedBatches
from meshwright.proof.program_plans.fit.config import FitConfig
from meshwright.proof.program_plans.fit.keys import is_key, key_data, keys_from
from meshwright.proof.program_plans.fit.step import FitStep, describe

State = dict[str, Any]
"""The arrays of a state by path."""


def run_steps(
    config: FitConfig,
    step: FitStep,
    first: Any,
    batches: Batches,
    directory: Path,
    interruption: Interruption,
    on_step: Callable[[Row], None],
    on_note: Note,
) -> tuple[State, int]:
    """Run the remaining steps of a run; return the last state, and the steps taken since the start of the run.

    directory: the run's; the caller holds its lock. first: the initial state, or a function that returns it. on_step:
    called with each row of metrics.
    """
    began = time.perf_counter()
    checkpoints = Checkpoints(directory, config.saving)

    def check(start: int) -> list[str]:
        before = checkpoints.about(start, "shapes") or {}
        where = f"{directory} cannot continue from checkpoint {start}"
        now = {path: describe(leaf) for path, leaf in step.state.items()}
        for path in {**before, **now}:
            if before.get(path) != now.get(path):
                raise MeshwrightError(
                    f"{where}: its state is another, {path} is {now.get(path, 'gone')}, and was"
                    f" {before.get(path, 'not there')}"
                )
        return []

    start = last_checkpoint(directory, checkpoints, config.steps, on_note, check, more="steps={} would continue")
    if start >= config.steps:
        return _restored(step, checkpoints, start), start
    source = PlacedBatches(batches, step.batch, start, checkpoints.about(start, "batches") if start else None)
    shapes = {path: describe(leaf) for path, leaf in step.state.items()}

    def about(taken: int) -> dict[str, Any]:
        return {"config": config.to_json(), "shapes": shapes, "batches": source.position(taken)}

    def left(is_not_finite: bool) -> str:
        return left_on_disk(config, directory, " with a smaller learning rate" if is_not_finite else "")

    with stopped_run_errors(directory, start, interruption, left), ExitStack() as exits:
        log = exits.enter_context(RunLog(directory, on_note, config=config.to_json())) if is_first_process() else None
        exits.enter_context(checkpoints)
        check_free(directory, _as_saved(step.state), what=f"train in {directory}")
        program = StepProgram(step.jitted, on_note)
        saver = Saver(config.saving, directory, checkpoints, _as_saved, about, log, on_note, allows_infinity=True)
        run = _Run(
            config=config, directory=directory, step=step, program=program, batches=source, checkpoints=checkpoints,
            saver=saver, log=log, interruption=interruption, start=start, began=began, on_step=on_step, on_note=on_note,
        )  # fmt: skip
        return run.take_all(_restored(step, checkpoints, start) if start else step.place(first))


def left_on_disk(config: FitConfig, directory: Path, how: str = "") -> str:
    """Return a sentence on the checkpoint of a stopped run and the call that continues it. how: text after the call."""
    hint = "" if config.saving.every else " (save_every=N, or a time as 30m, writes some on the way)"
    return describe_left(directory, f"`mw.fit(…, resume=True)`{how}", hint)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run with its outputs. start: steps taken before it was resumed. began: `time.perf_counter()` at this start."""

    config: FitConfig
    directory: Path
    step: FitStep
    program: StepProgram
    batches: PlacedBatches
    checkpoints: Checkpoints
    saver: Saver
    log: RunLog | None
    interruption: Interruption
    start: int
    began: float
    on_step: Callable[[Row], None]
    on_note: Note

    def take_all(self, state: State) -> tuple[State, int]:
        """Run steps until the last one, a signal or the end of the batches, and save; return state and steps taken.

        Raises:
            NotFiniteError: the loss or the norm of the gradients is NaN or infinite.
            MeshwrightError: the batches ended early; the state has been saved.
        """
        config, bad_steps = self.config, BadSteps(None, ())
        planned = config.predicted and config.predicted.step_seconds
        platform = self.step.mesh.devices.flat[0].platform
        shortfall = Shortfall(planned or 0.0, is_simulated=platform == "cpu")
        runs_ahead, taken = platform != "cpu", self.start
        for row, after in self._rows(state, runs_ahead=runs_ahead):
            taken = row["step"] + 1
            if not self.interruption.has_begun:
                self._begin(row, on_tpu=platform == "tpu")
            if self.log is not None:
                self.log.add(row)
            if reason := bad_steps.reason(row):
                # If the state is not finite, the checkpoint of the one before it is set aside.
                if is_first_process():
                    log_bad_step(self.directory, row, reason, {})
                if not all(math.isfinite(row.get(name, 0.0)) for name in ("loss", "grad_norm")):
                    self.checkpoints.set_aside_nan(row["step"])
                raise NotFiniteError(f"{reason} at step {row['step'] + 1} ({self.directory / FILE}); training stops")
            if planned and (line := shortfall.add(row)) is not None:
                self.on_note(line)
            self.on_step(row)
            self.saver.check()
            if after is None:
                continue
            state = after
            if not runs_ahead:
                self.saver.decide(taken, self.interruption, waits=True)
            is_last = taken == config.steps or self.interruption.stop is not None or self.batches.has_ended
            if is_last or self.saver.is_due:
                shortfall.add_later({"save_seconds": self.saver.save(taken, after, is_last=is_last)})
            if is_last:
                break
        if self.batches.has_ended and self.interruption.stop is None:
            raise MeshwrightError(f"batches ended after {taken} of {config.steps} steps")
        return state, taken

    def _rows(self, state: State, *, runs_ahead: bool) -> Iterator[tuple[Row, State | None]]:
        """Yield the row of each step and the state after it; None if the next step has already consumed the state.

        runs_ahead: whether each step is dispatched before the previous row is read, as in `take_steps`.
        """

        def needs_state(step: int) -> bool:
            self.saver.decide(step + 1, self.interruption, waits=False)
            return self.interruption.stop is not None or self.saver.is_due or self.batches.has_ended

        steps = range(self.start, self.config.steps)
        common = {"mesh": self.config.mesh_text, "hardware": self.config.hardware, "began_at": self.start}
        for row, after in take_steps(
            self.program, self.batches, state, steps, needs_state=needs_state, runs_ahead=runs_ahead
        ):
            yield common | row, after

    def _begin(self, row: Row, *, on_tpu: bool) -> None:
        """Write the run's files after its first step, and add the startup time to that step's row."""
        row["startup_seconds"] = (
            time.perf_counter() - self.began - row["step_seconds"] - row.get("compile_seconds", 0.0)
        )
        if is_first_process():
            begin_directory(self.config, self.directory, self.checkpoints, self.start, row, self.on_note)
        self.interruption.has_begun = True
        if self.log is not None:
            assert self.program.compiled is not None
            record = compiled_record(self.program.compiled, self.config.mesh, self.config.hardware, on_tpu=on_tpu)
            self.log.begin(self.start, record)


def _as_saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"state": the state, with random keys as integer arrays}, as a checkpoint stores it."""
    return {"state": {path: key_data(leaf) if is_key(leaf) else leaf for path, leaf in state.items()}}


def _restored(step: FitStep, checkpoints: Checkpoints, start: int) -> State:
    """Return the state of a checkpoint, sharded for this run."""
    found = checkpoints.restore(start, _as_saved(step.state))["state"]
    return {path: keys_from(found[path], leaf) if is_key(leaf) else found[path] for path, leaf in step.state.items()}
