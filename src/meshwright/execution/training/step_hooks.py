"""Work after each step: log its row, handle bad steps, profile, evaluate, save, and decide to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from meshwright.description.hlo.versions import untested_notes
from meshwright.execution.training.inputs import StepInputs
from meshwright.execution.training.interrupt import Interruption
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.execution.training.run_directory.restart import begin, is_first_process
from meshwright.execution.training.run_directory.run import NotFiniteError, Row, RunConfig
from meshwright.execution.training.run_directory.saver import Saver
from meshwright.execution.training.run_record import compiled_record
from meshwright.execution.training.step import State
from meshwright.execution.training.update.bad_steps import FILE, BadSteps, log_bad_step
from meshwright.execution.training.watch.evaluation import Evaluator
from meshwright.execution.training.watch.log import RunLog
from meshwright.execution.training.watch.profile import Profiler
from meshwright.execution.training.watch.shortfall import Shortfall


@dataclass(frozen=True, kw_only=True)
class StepHooks:
    """The hooks of the training loop, which calls `needs_state`, `handle_row` and `handle_state` in each step.

    Args:
        start: number of steps taken before the run was started or resumed.
        log: the log of the first process; None in the others.
        evaluate: computes an evaluation; None if the run is not evaluated.
        runs_ahead: whether steps are dispatched before the previous one is done, as in `take_steps`.
    """

    config: RunConfig
    directory: Path
    start: int
    interruption: Interruption
    checkpoints: Checkpoints
    inputs: StepInputs
    bad_steps: BadSteps
    shortfall: Shortfall
    saver: Saver
    evaluate: Evaluator | None
    log: RunLog | None
    profiler: Profiler
    runs_ahead: bool
    on_step: Callable[[Row], None]
    on_note: Note
    on_evaluation: Callable[[Row], None]

    def needs_state(self, step: int) -> bool:
        """Whether the state after a step is evaluated, saved or profiled, so that the next step waits for it."""
        self.saver.decide(step + 1, self.interruption, waits=False)
        is_evaluated = self.config.evaluating.is_due(step + 1)
        return self.interruption.stop is not None or self.saver.is_due or is_evaluated or self.profiler.is_due(step + 1)

    def begin(self, row: Row, compiled: jax.stages.Compiled) -> None:
        """Write the files of a run after the first step of this process, and add the sizes of the data to its row."""
        begin(self.config, self.directory, self.checkpoints, self.start, row, self.on_note)
        row |= self.inputs.counts
        self.inputs.keep()
        self.interruption.has_begun = True
        for note in untested_notes():
            self.on_note(note)
        if self.log is not None:
            config, on_tpu = self.config, self.config.system.chip.kind == "tpu"
            self.log.begin(self.start, compiled_record(compiled, config.mesh.degrees, config.hardware, on_tpu=on_tpu))

    def handle_row(self, row: Row) -> None:
        """Log the row of a step, check whether the step was bad, and note a run that is slower than its plan.

        Raises:
            NotFiniteError: the step was bad and not skipped, or too many steps in a row were skipped.
        """
        if self.log is not None:
            self.log.add(row)
        if reason := self.bad_steps.reason(row):
            self._handle_bad_step(row, reason)
        if (line := self.shortfall.add(row)) is not None:
            self.on_note(line)
        self.on_step(row)
        self.saver.check()

    def handle_state(self, row: Row, state: State) -> bool:
        """Profile, evaluate and save after a step, each if it is due. Return whether the run ends with this step."""
        taken = row["step"] + 1
        if self.profiler.is_due(taken):
            # The row's metrics are from one device; others may still run the step, which the trace must contain.
            jax.block_until_ready(state)
        self.profiler.after(taken)
        if not self.runs_ahead:
            self.saver.decide(taken, self.interruption, waits=True)
        is_done = taken == self.config.steps
        if self.evaluate is not None and (is_done or self.config.evaluating.is_due(taken)):
            evaluation = self.evaluate(state["params"], self._is_stopping)
            if evaluation is None:
                self.on_note(f"the evaluation after step {taken} is left out: the run is asked to stop")
            else:
                self.on_evaluation(row | evaluation)
                if self.log is not None:
                    self.log.add_later(evaluation)
        is_last = is_done or self.interruption.stop is not None
        if is_last or self.saver.is_due:
            stall = self.saver.save(taken, state, is_last=is_last)
            self.shortfall.add_later({"save_seconds": stall})
        return is_last

    def _is_stopping(self) -> bool:
        """Whether any process of the run was asked to stop; all processes call this together."""
        self.interruption.agree(False, waits=True)
        return self.interruption.stop is not None

    def _handle_bad_step(self, row: Row, reason: str) -> None:
        """Record a bad step with its data rows. Raise a `NotFiniteError` if it ends the run.

        It ends the run if it was not skipped, or if too many steps in a row were.

        If the step produced NaN, a checkpoint of the state before it is renamed, so that a resume takes an earlier one.
        """
        step = row["step"]
        if is_first_process():
            batch = {"seed": self.config.seed, "items": self.inputs.batches.items(step)}
            log_bad_step(self.directory, row, reason, batch)
        if row.get("skipped"):
            self.on_note(f"step {step + 1} is left out: {reason}")
            if self.bad_steps.in_a_row < self.config.optimizer.max_bad_steps:
                return
            reason = f"{self.bad_steps.in_a_row} steps in a row were left out, and in the last one {reason}"
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            self.checkpoints.set_aside_nan(step)
        raise NotFiniteError(
            f"{reason} at step {step + 1}, where the learning rate was {row['learning_rate']:.3g}"
            f" ({self.directory / FILE} has the rows it read); training stops"
        )
