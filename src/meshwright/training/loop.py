"""The training loop: steps from where a run stands to where it should end, kept track of in the run directory."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright.errors import MeshwrightError
from meshwright.planner import make_plan
from meshwright.record import Record
from meshwright.runtime import ShardingContext, build_mesh, token_order
from meshwright.step import (
    check_mesh,
    check_reference,
    check_runnable,
    check_stage_remat,
    check_strategy,
    rules_of,
    stream_rules,
)
from meshwright.text import Tokenizer
from meshwright.training.data import BYTES, Batches, HeldOut, RunData, open_data
from meshwright.training.data.pair_batches import PairBatches
from meshwright.training.data.pairs import PairData, load_pairs
from meshwright.training.interrupt import Interruption, Leave, interruptions
from meshwright.training.pretrained import run_tokenizer, tokenizer_checksum
from meshwright.training.program import StepProgram
from meshwright.training.run_directory.checkpoint import Checkpoints, Note, check_free
from meshwright.training.run_directory.frozen import abstract_parts
from meshwright.training.run_directory.lock import RunLock
from meshwright.training.run_directory.restart import (
    begin,
    check_identity,
    end_failed_start,
    first_state,
    is_first_process,
    last_step,
    order_of_checkpoints,
    what_is_left,
)
from meshwright.training.run_directory.run import NotFiniteError, Row, RunConfig, RunStoppedError, read_metrics
from meshwright.training.run_directory.saver import Saver
from meshwright.training.run_record import compiled_record, measured, seconds_at_peak
from meshwright.training.run_reference import begin_pairs
from meshwright.training.step import State, abstract_state, train_step
from meshwright.training.stepping import BatchOfStep, take_steps
from meshwright.training.update.bad_steps import BadSteps, LimitedBatches, note_bad_step
from meshwright.training.watch import (
    Evaluator,
    Profiler,
    RunLog,
    Shortfall,
    Tasks,
    load_wandb,
    parse_profile,
    profiled_collectives,
)


class Outcome(NamedTuple):
    """How a run ended: what was measured, the steps taken in all, and the signal that stopped it, if one did."""

    record: Record
    taken: int
    stopped_by: int | None


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
    """Train to `config.steps` steps, from the run's last whole checkpoint if it has one.

    Interrupted (SIGINT or SIGTERM) it finishes the step it is in and saves; called again it goes on from there. The
    mesh may be another than the one before. A run that has taken all its steps takes none and says so. Of several
    processes, which all call this and see one directory, the first writes what is not a checkpoint, and has the record;
    an interruption of one is for all.

    Args:
        config: all that the run depends on.
        directory: of the run; nothing but a lock is written there before the first step is taken.
        on_step: called with the metrics of every step.
        on_note: called with each line that a user should read.
        on_bytes: called with the bytes of each part of trained weights that was read.
        on_evaluation: called with the metrics of a step after which the run was evaluated, those of that among them.
        leave: ends the process where it is interrupted before the first step, which a compiler may take a minute for,
            or where the grace period of a SIGTERM is over; None has it go on.
        allow: kinds of differences to the checkpoint that the run goes on from all the same (`compatible.ALLOWED`).

    Raises:
        MeshwrightError: where the run cannot be started or gone on with.
        RunStoppedError: where it began and has to end early: a loss that is no number, a full disk, too little memory.
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


def _load_data(config: RunConfig, tokenizer: Tokenizer | None, on_note: Note) -> RunData | PairData:
    """The data of a run, or its pairs."""
    if config.workload.objective == "dpo":
        return load_pairs(config.data.sources, tokenizer, config.workload)
    return open_data(config.data, config.workload, tokenizer, seed=config.seed, on_note=on_note)


def _check(config: RunConfig) -> None:
    """Raise where a config cannot be run."""
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
    if workload.config.vocab < BYTES and config.tokenizer is None:
        raise MeshwrightError(f"vocab {workload.config.vocab} is too small for text as bytes, which wants {BYTES}")


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
    """The steps of a run whose directory is locked."""
    began = time.perf_counter()
    checkpoints = Checkpoints(directory, config.saving)
    if (start := last_step(config, directory, checkpoints, on_note, allow=allow)) >= config.steps:
        return Outcome(measured(config, read_metrics(directory)), start, None)
    tokenizer = run_tokenizer(config, directory)
    data = _load_data(config, tokenizer, on_note)
    identity = {"data": data.fingerprint, "tokenizer": tokenizer_checksum(config, directory)}
    check_identity(identity, directory, checkpoints, start, on_note, allow=allow)
    layout, mesh = ShardingContext(config.mesh, rules_of(config.strategy)), build_mesh(config.mesh)
    tasks = Tasks(config, mesh, tokenizer) if config.evaluating.tasks else None
    taken, runs_ahead = start, jax.local_devices()[0].platform != "cpu"
    try:
        with jax.set_mesh(mesh), ExitStack() as exits:
            log = exits.enter_context(RunLog(directory, config, on_note)) if is_first_process() else None
            exits.enter_context(checkpoints)
            profiler = None
            wanted = abstract_state(config.workload, layout, config.optimizer, mesh, config.strategy)
            check_free(directory, abstract_parts(config, wanted, mesh), what=f"train in {directory}")
            before = [row for row in read_metrics(directory) if row["step"] < start]
            bad_steps = BadSteps(config.optimizer.spike_factor, before)
            if isinstance(data, PairData):
                # Before the state, so that what a precomputed reference took is free again.
                pairs = begin_pairs(config, directory, data, mesh, start, on_note, on_bytes)
                batches, prepare = pairs.batches, pairs.prepare
            else:
                batches, prepare, pairs = _text_batches(config, data, layout, mesh), dict, None
                exits.callback(batches.close)
            first = first_state(config, layout, mesh, checkpoints, start, on_bytes)
            is_limited = config.strategy.on_bad_step == "skip"
            of_steps = LimitedBatches(batches, bad_steps.limits, mesh) if is_limited else batches
            about = {"config": config.to_json(), "identity": identity}
            in_order = order_of_checkpoints(config, layout, mesh)
            saver = Saver(config, directory, checkpoints, in_order, about, log, on_note)
            step_of = train_step(config.workload, layout, config.optimizer, config.strategy, config.preference)
            program = StepProgram(step_of, on_note, prepare)
            planned = make_plan(config.workload, config.mesh, config.system, config.strategy).predicted.step_seconds
            shortfall = Shortfall(planned or 0.0, is_simulated=config.system.chip.kind == "cpu")
            evaluate = None
            if config.evaluating.every:
                held_out = _held_out(config, batches, tokenizer, on_note)
                evaluate = Evaluator(config, layout, held_out, tasks)
            if is_first_process():
                profiler = exits.enter_context(Profiler(directory, config, program, start, on_note))

            def is_due(step: int) -> bool:
                """Whether the state after a step is looked at before the next step is taken."""
                saver.decide(step + 1, interruption, waits=False)
                is_profiled = profiler is not None and profiler.is_due(step + 1)
                is_wanted = saver.is_due or config.evaluating.is_due(step + 1) or is_profiled
                return interruption.stop is not None or is_wanted

            for row, state in _rows(config, program, of_steps, first, start, is_due, runs_ahead=runs_ahead):
                taken = row["step"] + 1
                if isinstance(batches, Batches):
                    row |= batches.row(row["step"])
                if not interruption.has_begun:
                    row["startup_seconds"] = time.perf_counter() - began - row["step_seconds"] - row["compile_seconds"]
                    begin(config, directory, checkpoints, start, row, on_note)
                    if pairs is not None:
                        row |= pairs.counts
                        pairs.keep()
                    interruption.has_begun = True
                    if log is not None:
                        assert program.compiled is not None
                        log.begin(start, compiled_record(config, program.compiled))
                if log is not None:
                    log.add(row)
                if why := bad_steps.why(row):
                    text = {"seed": config.seed, "items": batches.items(row["step"])}
                    _tell_bad_step(config, directory, row, why, text, bad_steps, checkpoints, on_note)
                if (line := shortfall.add(row)) is not None:
                    on_note(line)
                on_step(row)
                saver.check()
                if state is None:
                    continue
                if profiler is not None:
                    profiler.after(taken)
                if not runs_ahead:
                    saver.decide(taken, interruption, waits=True)
                is_last = taken == config.steps or interruption.stop is not None
                if evaluate is not None and (taken == config.steps or config.evaluating.is_due(taken)):
                    found = evaluate(state["params"])
                    on_evaluation(row | found)
                    if log is not None:
                        log.add_later(found)
                if is_last or saver.is_due:
                    stall = saver.save(taken, state, is_last=is_last)
                    shortfall.add_later({"save_seconds": stall})
                if is_last:
                    break
    except NotFiniteError as error:
        how = "--resume --change --learning-rate RATE"
        raise RunStoppedError(f"{error}; {what_is_left(config, directory, how)}") from None
    except MeshwrightError as error:
        if not interruption.has_begun:
            raise
        end_failed_start(directory, start)
        raise RunStoppedError(f"{error}; training stops; {what_is_left(config, directory)}") from None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise RunStoppedError(f"the devices are out of memory: {str(error).splitlines()[0][:200]}") from None
    record = measured(config, read_metrics(directory), profiled_collectives(directory, config))
    return Outcome(record, taken, interruption.stop)


def _text_batches(config: RunConfig, data: RunData, layout: ShardingContext, mesh: Mesh) -> Batches:
    """The batches of a run of text or records."""
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    order = token_order(config.workload.seq_len, layout, config.strategy)
    draws = config.strategy.dropout > 0
    shape = (config.workload.batch, config.workload.seq_len)
    return Batches(data, sharding, shape, seed=config.seed, order=order, draws=draws)


def _held_out(
    config: RunConfig, batches: Batches | PairBatches, tokenizer: Tokenizer | None, on_note: Note
) -> HeldOut | None:
    """What a run's loss is evaluated on: rows of other files, or those that its own data holds out.

    None where it learns from pairs and is evaluated by tasks alone.
    """
    if not isinstance(batches, Batches):
        if config.evaluating.tasks and config.evaluating.batches is None and not config.evaluating.data:
            return None
        raise MeshwrightError("eval_every is of runs that learn from text; --objective dpo has none yet, leave it out")
    if not config.evaluating.data:
        return batches.held_out
    other = replace(config.data, sources=config.evaluating.data, held_out=0.0)
    return batches.in_order(open_data(other, config.workload, tokenizer, seed=config.seed, on_note=on_note).training)


def _tell_bad_step(
    config: RunConfig,
    directory: Path,
    row: Row,
    why: str,
    text: Mapping[str, Any],
    bad_steps: BadSteps,
    checkpoints: Checkpoints,
    on_note: Note,
) -> None:
    """Note a bad step that was left out, with the text that it read; raise where it was not, or too many were in a row.

    The checkpoint that it came from is put aside where it gives no numbers.
    """
    step = row["step"]
    if row.get("skipped"):
        if is_first_process():
            note_bad_step(directory, row, why, text)
        on_note(f"step {step + 1} is left out: {why}")
        if bad_steps.in_a_row < config.optimizer.max_bad_steps:
            return
        why = f"{bad_steps.in_a_row} steps in a row were left out, and in the last one {why}"
    if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
        checkpoints.wait()
        if is_first_process() and step in checkpoints.steps:
            checkpoints.set_aside(step, "nan")
    raise NotFiniteError(
        f"{why} at step {step + 1}, where the learning rate was {row['learning_rate']:.3g}; training stops"
    )


def _rows(
    config: RunConfig,
    program: StepProgram,
    batches: BatchOfStep,
    state: State,
    start: int,
    is_due: Callable[[int], bool],
    *,
    runs_ahead: bool,
) -> Iterator[tuple[Row, State | None]]:
    """The whole row of each step from `start` on, with the state after it as `take_steps` has it."""
    tokens, at_peak = config.workload.tokens, seconds_at_peak(config)
    steps = range(start, config.steps)
    for found, state_after in take_steps(program, batches, state, steps, is_due=is_due, runs_ahead=runs_ahead):
        seconds = found["step_seconds"]
        row = {"mesh": str(config.mesh), "hardware": config.hardware, "began_at": start} | found
        row |= {"learning_rate": config.optimizer.rate(found["step"])}
        yield row | {"tokens_per_second": tokens / seconds, "mfu": at_peak / seconds}, state_after
