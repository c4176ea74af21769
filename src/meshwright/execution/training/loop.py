"""The training loop: take the remaining steps of a run, and record them in its directory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from meshwright.description.step.legality import check_mesh, check_runnable, check_strategy
from meshwright.description.step.reference import check_reference
from meshwright.description.step.rules import rules_of, stream_rules
from meshwright.description.step.stages import check_stage_remat
from meshwright.errors import MeshwrightError
from meshwright.execution.data.sources import FileSource
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.data.pairs import RunPairs, open_pairs
from meshwright.execution.training.data.run_data import check_templates, open_data
from meshwright.execution.training.data.stores import run_sources
from meshwright.execution.training.data.texts import BYTES
from meshwright.execution.training.inputs import text_inputs
from meshwright.execution.training.interrupt import Interruption, Leave, interruptions
from meshwright.execution.training.preference.inputs import pair_inputs
from meshwright.execution.training.pretrained import run_tokenizer, tokenizer_checksum
from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note, check_free
from meshwright.execution.training.run_directory.frozen import abstract_parts
from meshwright.execution.training.run_directory.lock import RunLock
from meshwright.execution.training.run_directory.restart import (
    check_identity,
    first_state,
    is_first_process,
    last_step,
    order_of_checkpoints,
    stopped_run_errors,
    what_is_left,
)
from meshwright.execution.training.run_directory.run import Row, RunConfig, read_metrics
from meshwright.execution.training.run_directory.saver import Saver
from meshwright.execution.training.run_record import measured, seconds_at_peak
from meshwright.execution.training.step import State, abstract_state, train_step
from meshwright.execution.training.step_hooks import StepHooks
from meshwright.execution.training.stepping import BatchSource, take_steps
from meshwright.execution.training.update.bad_steps import BadSteps, LimitedBatches
from meshwright.execution.training.watch.evaluation import Evaluator
from meshwright.execution.training.watch.log import RunLog
from meshwright.execution.training.watch.profile import Profiler, find_profile, parse_profile
from meshwright.execution.training.watch.shortfall import Shortfall
from meshwright.execution.training.watch.tasks import Tasks
from meshwright.execution.training.watch.weights_and_biases import load_wandb
from meshwright.record import Record


class Outcome(NamedTuple):
    """The result of a run."""

    record: Record  # Its measurements.
    taken: int  # Steps taken so far, including those before a resume.
    stopped_by: int | None  # The signal that stopped it; None for none.


def run_steps(
    config: RunConfig,
    directory: Path,
    *,
    on_step: Callable[[Row], None] = lambda row: None,
    on_note: Note = warnings.warn,
    on_bytes: Callable[[int], None] = lambda n: None,
    on_evaluation: Callable[[Row], None] = lambda row: None,
    leave: Leave | None = None,
    allow: Collection[str] = (),
) -> Outcome:
    """Train to `config.steps` steps, starting from the last complete checkpoint of the directory, if it has any.

    After a SIGINT or SIGTERM the current step is finished and saved; another call resumes the run, also on another
    mesh. If the run is already finished, no step is taken. With several processes, all call this with one directory:
    the first writes everything but checkpoints, and an interruption of one process interrupts all.

    Args:
        config: everything that the run depends on.
        directory: directory of the run; only a lock is written before the first step.
        on_step: called with the metrics of each step.
        on_note: called with each line for the user.
        on_bytes: called with the number of bytes of each part of pretrained weights that is read.
        on_evaluation: called with the metrics of a step, including those of its evaluation.
        leave: ends the process if it is interrupted before the first step, which can take a minute to compile, or when
            the grace period of a SIGTERM is over. None: the process is never ended.
        allow: kinds of checkpoint differences to accept (`compatible.ALLOWED`).

    Raises:
        MeshwrightError: the run cannot be started or resumed.
        RunStoppedError: the run started and must end early, because the loss is NaN, a disk is full or memory runs out.
    """
    _check(config)
    lock = RunLock(directory, on_note) if is_first_process() else None

    def leave_unlocked(number: int, is_late: bool) -> None:
        if lock is not None:
            lock.release()
        if leave is not None:
            leave(number, is_late)

    try:
        grace = config.saving.grace_seconds
        with interruptions(on_note, leave and leave_unlocked, grace_seconds=grace) as interruption:
            return _run(config, directory, interruption, on_step, on_note, on_bytes, on_evaluation, allow)
    finally:
        if lock is not None:
            lock.release()


def _check(config: RunConfig) -> None:
    """Raise a `MeshwrightError` if a config cannot be run."""
    workload = config.workload
    check_runnable(workload.config, config.mesh, config.strategy)
    check_mesh(workload, config.mesh, stream_rules(config.strategy.tp_stream))
    check_strategy(workload, config.mesh, config.strategy)
    check_stage_remat(workload.remat, config.mesh, config.strategy)
    check_reference(workload, config.mesh, config.strategy, runs=True)
    if config.watching.wandb is not None:
        load_wandb()
    if config.watching.profile is not None:
        parse_profile(config.watching.profile)
    reads_bytes = config.tokenizer is None and any(
        isinstance(source, FileSource) and source.kind == "text" for source in run_sources(config.data)
    )
    # Records are checked later, when they are opened, because they may have token ids.
    if workload.config.vocab < BYTES and reads_bytes:
        raise MeshwrightError(f"vocab {workload.config.vocab} is too small for text as bytes, which needs {BYTES}")


def _run(
    config: RunConfig,
    directory: Path,
    interruption: Interruption,
    on_step: Callable[[Row], None],
    on_note: Note,
    on_bytes: Callable[[int], None],
    on_evaluation: Callable[[Row], None],
    allow: Collection[str],
) -> Outcome:
    """Take the steps of a run whose directory this process has locked; arguments are as in `run_steps`."""
    began = time.perf_counter()
    checkpoints = Checkpoints(directory, config.saving)
    if (start := last_step(config, directory, checkpoints, on_note, allow=allow)) >= config.steps:
        return Outcome(_measured(config, directory, on_note), start, None)
    tokenizer = run_tokenizer(config, directory)
    if config.workload.objective == "dpo":
        data = open_pairs(config.data, config.evaluating.data, tokenizer, config.workload)
    else:
        check_templates(config.data, config.evaluating.data)
        if config.data.held_out and not (config.evaluating.every and not config.evaluating.data):
            share = f"{config.data.held_out:.0%}"
            on_note(
                f"held_out leaves {share} of the data out of training, and nothing evaluates on it: --eval-every N does"
            )
        data = open_data(config.data, config.workload, tokenizer, seed=config.seed, on_note=on_note)
    identity = {"data": data.fingerprint, "tokenizer": tokenizer_checksum(config, directory)}
    check_identity(identity, directory, checkpoints, start, on_note, allow=allow)
    layout, mesh = ShardingContext(config.mesh, rules_of(config.strategy)), build_mesh(config.mesh)
    tasks = Tasks(config, mesh, tokenizer) if config.evaluating.tasks else None

    def left(is_not_finite: bool) -> str:
        how = "--resume --change --learning-rate RATE" if is_not_finite else "--resume"
        return what_is_left(config, directory, how)

    with stopped_run_errors(directory, start, interruption, left), jax.set_mesh(mesh), ExitStack() as exits:
        log = None
        if is_first_process():
            log = RunLog(directory, on_note, wandb=config.watching.wandb, config=config.to_json())
            exits.enter_context(log)
        exits.enter_context(checkpoints)
        abstract = abstract_state(config.workload, layout, config.optimizer, mesh, config.strategy)
        check_free(directory, abstract_parts(config, abstract, mesh), what=f"train in {directory}")
        # Make the inputs before the state, so that the memory for precomputing a reference is free again.
        if isinstance(data, RunPairs):
            inputs = pair_inputs(config, directory, data, mesh, start, on_note, on_bytes)
        else:
            inputs = text_inputs(config, data, layout, mesh, tokenizer, on_note)
        exits.callback(inputs.batches.close)
        state = first_state(config, layout, mesh, checkpoints, start, on_bytes)
        step = train_step(config.workload, layout, config.optimizer, config.strategy, config.preference)
        program = StepProgram(step, on_note, inputs.prepare)
        earlier_rows = [row for row in read_metrics(directory) if row["step"] < start]
        about = {"config": config.to_json(), "identity": identity}
        ordered = order_of_checkpoints(config, layout, mesh)
        planned = config.plan.predicted.step_seconds or 0.0
        hooks = StepHooks(
            config=config, directory=directory, start=start, interruption=interruption, checkpoints=checkpoints,
            inputs=inputs, bad_steps=BadSteps(config.optimizer.spike_factor, earlier_rows),
            shortfall=Shortfall(planned, is_simulated=config.system.chip.kind == "cpu"),
            saver=Saver(config.saving, directory, checkpoints, ordered, lambda taken: about, log, on_note),
            evaluate=Evaluator(config, layout, inputs.held_out, tasks) if config.evaluating.every else None, log=log,
            profiler=exits.enter_context(Profiler(directory, config, program, start, on_note)),
            runs_ahead=jax.local_devices()[0].platform != "cpu",
            on_step=on_step, on_note=on_note, on_evaluation=on_evaluation,
        )  # fmt: skip
        taken = _take_all(program, state, hooks, mesh, began)
    return Outcome(_measured(config, directory, on_note), taken, interruption.stop)


def _measured(config: RunConfig, directory: Path, on_note: Note) -> Record:
    """Return the measured record of a run from the files in its directory. on_note: called with each of its notes."""
    record = measured(config, read_metrics(directory), find_profile(directory, config))
    for line in record.notes:
        on_note(line)
    return record


def _take_all(program: StepProgram, state: State, hooks: StepHooks, mesh: Mesh, began: float) -> int:
    """Take the steps of a run until its end or an interruption. Return its number of steps, those before a resume too.

    began: value of `time.perf_counter` at the start of the run.
    """
    batches: BatchSource = hooks.inputs.batches
    if hooks.config.strategy.on_bad_step == "skip":
        batches = LimitedBatches(batches, hooks.bad_steps.limits, mesh)
    taken = hooks.start
    for row, state_after in _rows(program, batches, state, hooks):
        taken = row["step"] + 1
        row |= hooks.inputs.batches.row(row["step"])
        if not hooks.interruption.has_begun:
            row["startup_seconds"] = time.perf_counter() - began - row["step_seconds"] - row["compile_seconds"]
            assert program.compiled is not None
            hooks.begin(row, program.compiled)
        hooks.handle_row(row)
        if state_after is not None and hooks.handle_state(row, state_after):
            break
    return taken


def _rows(
    program: StepProgram, batches: BatchSource, state: State, hooks: StepHooks
) -> Iterator[tuple[Row, State | None]]:
    """Yield (row, state) of each step, as `take_steps` does.

    Mesh, hardware, learning rate, tokens per second and MFU are added to the row.
    """
    config, steps = hooks.config, range(hooks.start, hooks.config.steps)
    tokens, at_peak = config.workload.tokens, seconds_at_peak(config)
    for measured_row, state_after in take_steps(
        program, batches, state, steps, needs_state=hooks.needs_state, runs_ahead=hooks.runs_ahead
    ):
        seconds = measured_row["step_seconds"]
        row = {"mesh": str(config.mesh), "hardware": config.hardware, "began_at": hooks.start} | measured_row
        row |= {"learning_rate": config.optimizer.rate(measured_row["step"])}
        yield row | {"tokens_per_second": tokens / seconds, "mfu": at_peak / seconds}, state_after
