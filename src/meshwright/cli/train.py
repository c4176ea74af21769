"""`meshwright train`: a run from its first step, or on from its last checkpoint."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from meshwright.cli.arguments import Json, Mesh, StrategyArgs, WorkloadArgs, given_options, option, positional
from meshwright.cli.tables import console, headline, promise, show, speed, table
from meshwright.cli.text import next_line
from meshwright.cli.train_options import DataArgs, OptimizerArgs, PreferenceArgs, SavingArgs, StartArgs, WatchArgs
from meshwright.cli.train_screen import TrainScreen
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.planner import make_plan, plan_to_run
from meshwright.processes import REFUSED, Processes, leave_at_once
from meshwright.record import Record
from meshwright.units import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.training import RunConfig


EXAMPLES = (
    "meshwright train tiny --on cpu:8 --mesh 1,2,4,1 --batch 16 --seq-len 256 --steps 200",
    "meshwright train plan.yaml -o runs/first",
    "meshwright train runs/tiny --resume --steps 400",
    "meshwright train runs/tiny --resume --change --learning-rate 1e-3",
    "meshwright train runs/tiny --resume --steps 400 --on cpu:4 --mesh 1,4,1,1",
    "meshwright train plan.yaml -o runs/first --resume",
    "meshwright train plan.yaml --coordinator localhost:1234 --num-processes 2 --process-id 0",
)

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class RunArgs:
    """The run."""

    mesh: Mesh = None
    """fsdp=-1,tp=4, or dp,fsdp,tp,sp as 1,-1,4,1. One degree may be -1. Default: the planner chooses."""
    steps: Annotated[str | None, option("N")] = None
    """The end of the whole run, steps before a --resume included. Default: 200; a run that goes on has its own."""
    output: Annotated[Path | None, option("DIRECTORY", "-o")] = None
    """The run directory. Default: runs/MODEL."""
    resume: Annotated[bool, option()] = False
    """Go on from the last whole checkpoint of the run given as MODEL; with -o, of the run there, or begin it."""
    change: Annotated[bool, option()] = False
    """With --resume: go on with the settings given here where they are others than the run's."""
    allow: Annotated[str | None, option("KINDS")] = None
    """With --resume: go on though the checkpoint's data, dtype, optimizer or tokenizer (kind,kind) are others."""
    anyway: Annotated[bool, option()] = False
    """Train though the plan does not fit the memory, or text is bytes and the vocabulary is larger than these 256."""
    config: Annotated[Path | None, option("FILE")] = None
    """A YAML file of these options by their names, `model` too, or a plan's; what is typed counts before it."""
    dry_run: Annotated[bool, option()] = False
    """Compile the step, say what memory it takes and how long the run would be, and stop; nothing is written."""
    json: Json = False
    """Print the measured record, with the first and last loss, instead of the bar."""


@dataclass(frozen=True)
class ProcessArgs:
    """Several processes of one run, all started with the same arguments. Default: one."""

    coordinator: Annotated[str | None, option("HOST:PORT")] = None
    """Where the processes meet: HOST:PORT of the first; auto where the cluster says it (Cloud TPU, Slurm)."""
    num_processes: Annotated[int | None, option("N")] = None
    """How many processes there are, each with as many of the devices."""
    process_id: Annotated[int | None, option("N")] = None
    """Which of them this is, from 0; the first writes the run directory and prints."""
    start_seconds: Annotated[float | None, option("SECONDS")] = None
    """How long they wait for each other before they start. Default: 300."""


@dataclass(frozen=True)
class Args:
    """Train a model on a mesh: a progress bar, and a run directory with config, metrics and checkpoints."""

    model: Annotated[tyro.conf.Positional[str], positional("MODEL")]
    """A preset (tiny, llama3-8b, …), a Hugging Face directory or config.json, a plan.yaml, or with --resume a run."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    run: RunArgs = field(default_factory=RunArgs)
    start: StartArgs = field(default_factory=StartArgs)
    data: DataArgs = field(default_factory=DataArgs)
    preference: PreferenceArgs = field(default_factory=PreferenceArgs)
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    saving: SavingArgs = field(default_factory=SavingArgs)
    watching: WatchArgs = field(default_factory=WatchArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)
    process: ProcessArgs = field(default_factory=ProcessArgs)

    @property
    def options(self) -> dict[str, Any]:
        """What is said of the plan."""
        return given_options(self.workload, self.strategy) | {"mesh": self.run.mesh}

    @property
    def settings(self) -> dict[str, Any]:
        """What is said of the run beside its plan."""
        own = given_options(self.start, self.data, self.preference, self.optimizer, self.saving, self.watching)
        return own | {"adapter": self.workload.adapter}


def run(args: Args) -> int:
    """Train, and print what was measured beside what was planned.

    The exit code: 0 done or stopped by SIGTERM, 1 does not fit or could not go on, 130 interrupted.
    """
    config, directory = _resumed(args) if args.run.resume else _begun(args)
    from meshwright.training import DoesNotFitError, RunStoppedError, check_start

    try:
        planned = check_start(config, anyway=args.run.anyway)
        if args.run.dry_run:
            return _dry_run(args, config, planned)
        return _train(args, config, directory, planned)
    except (DoesNotFitError, RunStoppedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _dry_run(args: Args, config: RunConfig, planned: Record) -> int:
    """Compile the step of a run for its hardware, which need not be there, and print what the run would take."""
    from meshwright.verification import verify_plan

    as_json = args.run.json
    check_all_read(args, "beside --dry-run")
    plan = make_plan(config.workload, config.mesh, config.system, config.strategy)
    with waiting(f"compiling {config.workload.model.name} on {config.mesh} for {config.hardware}"):
        compiled = verify_plan(plan).compiled
    memory, usable = compiled.memory_bytes["peak"], config.system.usable_bytes
    seconds, tokens = planned.step_seconds or 0.0, config.workload.tokens
    fits = memory <= usable
    found = {
        "fits": fits,
        "memory_bytes": {"planned": planned.memory_bytes["peak"], "compiled": memory, "usable": usable},
        "step_seconds": seconds,
        "tokens_a_step": tokens,
        "steps": config.steps,
        "tokens": tokens * config.steps,
        "seconds": seconds * config.steps,
    }
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(console(), headline(config.workload, config.hardware))
        print(f"mesh {config.mesh}")
        print(
            f"memory: {show_bytes(planned.memory_bytes['peak'])} planned, {show_bytes(memory)} compiled, of"
            f" {show_bytes(usable)} a device" + ("" if fits else ": DOES NOT FIT")
        )
        print(f"a step: {show_seconds(seconds)}, {tokens:,} tokens, {show_rate(tokens / seconds, 'tok/s')} (plan)")
        print(f"to the end: {config.steps:,} steps, {tokens * config.steps:,} tokens, {_long(seconds * config.steps)}")
        print("nothing was written; without --dry-run the run begins")
    return 0 if fits else FAILED


def _long(seconds: float) -> str:
    """A time of up to weeks."""
    days, rest = divmod(round(seconds), 86_400)
    hours, minutes = rest // 3600, rest % 3600 // 60
    if days or hours:
        return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"
    return f"{minutes} min {rest % 60} s" if minutes else show_seconds(seconds)


def _train(args: Args, config: RunConfig, directory: Path, planned: Record) -> int:
    """Take the steps of a run on its devices, with a screen."""
    from meshwright.runtime import claim_devices
    from meshwright.training import (
        RunStoppedError,
        allowed_differences,
        is_first_process,
        run_steps,
        what_is_left,
    )

    with waiting(f"starting {config.hardware}"):
        which = {name: value for name, value in vars(args.process).items() if value is not None}
        several = claim_devices(config.system, Processes(**which), config.to_json())
    is_first = is_first_process()
    on = f"`meshwright train {shlex.quote(str(directory))} --resume` goes on"
    allow = allowed_differences(args.run.allow, args.settings, change=args.run.change)
    screen = TrainScreen(config.steps, planned, is_quiet=args.run.json or not is_first)
    if several is not None:
        several.before_end = screen.stop

    def step(row: dict[str, Any]) -> None:
        if several is not None:
            several.step = row["step"] + 1
        screen.step(row)

    def note(line: str) -> None:
        if is_first:
            screen.note(line)

    def leave(number: int, is_late: bool) -> NoReturn:
        screen.stop()
        code = 0 if number == signal.SIGTERM else INTERRUPTED
        if is_late:
            code = FAILED
            grace = f"the {config.saving.grace_seconds:g} s of --grace-seconds are over"
            what = f"error: {grace} and the run is not saved; {what_is_left(config, directory)}"
        elif (directory / "config.json").exists():
            what = f"stopped before a step was taken; {on}"
        else:
            what = "stopped before the first step"
        if is_first:
            print(what, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Python would wait for the compiler, which a second interruption does not end either.
        os._exit(code)

    if not screen.is_quiet:
        show(console(), headline(config.workload, config.hardware))
        show(console(), f"mesh {config.mesh} · plan: {speed(planned)}   {promise(planned)}")
        sys.stdout.flush()
    try:
        with screen:
            outcome = run_steps(
                config,
                directory,
                on_step=step,
                on_note=note,
                on_bytes=screen.read,
                on_evaluation=screen.evaluated,
                leave=leave,
                allow=allow,
            )
    except KeyboardInterrupt:
        print(f"stopped at once, without saving, at {screen.taken} of {config.steps}; {on}", file=sys.stderr)
        if several is not None:
            leave_at_once(INTERRUPTED)
        return INTERRUPTED
    except MeshwrightError as error:
        if several is not None:
            several.fail(str(error), FAILED if isinstance(error, RunStoppedError) else REFUSED)
        raise
    except Exception:  # Whatever it was, the other processes are told before its traceback.
        if several is not None:
            several.crash()
        raise
    if several is not None:
        several.leave()
    is_done = outcome.taken >= config.steps
    code = INTERRUPTED if outcome.stopped_by == signal.SIGINT and not is_done else 0
    if not is_first:
        return code
    if args.run.json:
        print(json.dumps(outcome.record.to_json() | {"steps": outcome.taken, "loss": screen.ends}, indent=2))
    elif screen.taken:
        print("\n".join(screen.summary()))
        show(console(), f"measured: {speed(outcome.record)}   (plan: {speed(planned)})")
        _show_profile(config, directory, planned)
    if not is_done:
        print(f"stopped at {outcome.taken} of {config.steps}; {on}", file=sys.stderr)
        return code
    if not args.run.json:
        print(next_line(f"meshwright generate {shlex.quote(str(directory))}"))
    return 0


def _show_profile(config: RunConfig, directory: Path, planned: Record) -> None:
    """The collectives of the run's profile beside planned and compiled ones, if it was to have one."""
    from meshwright.training.watch import read_profile

    if config.watching.profile is None or (profile := read_profile(directory)) is None:
        return
    from meshwright.verification import compare_profile
    from meshwright.viz.rows import PROFILE_COLUMNS, profile_rows

    rows = profile_rows(compare_profile(planned, profile))
    first, last = profile.steps
    print()
    show(console(), f"profile of steps {first} to {last}: bytes a device and step, then seconds")
    show(console(), table(PROFILE_COLUMNS, rows, left=(0, 1, 2)))
    for note in profile.measured.notes:
        show(console(), f"note: {note}")
    show(console(), f"traces: {directory / 'profile'} (xprof), and its .trace.json.gz for ui.perfetto.dev")


def _begun(args: Args) -> tuple[RunConfig, Path]:
    """A new run's config, and its directory, which must not hold one already."""
    run = args.run
    if run.allow:
        raise MeshwrightError("--allow is for a run that goes on (--resume), and this one begins; leave it out")
    if run.change:
        raise MeshwrightError("--change is for a run that goes on (--resume), and this one begins; leave it out")
    plan = plan_to_run(args.model, args.options)
    directory = run.output if run.output is not None else Path("runs") / plan.workload.model.name
    with waiting("loading JAX"):
        from meshwright.training import new_run

    config = new_run(args.model, plan, directory, steps=run.steps, settings=args.settings)
    return config, directory


def _resumed(args: Args) -> tuple[RunConfig, Path]:
    """The config of a run as it goes on, what is another than before is said; of a new one where -o holds none."""
    with waiting("loading JAX"):
        from meshwright.training import allowed_differences, resumed_run, run_to_resume

    run = args.run
    if (directory := run_to_resume(args.model, run.output)) is None:
        return _begun(args)
    what, options = None if run.output is None else args.model, args.options | args.settings
    allow = allowed_differences(run.allow, args.settings, change=run.change)
    config, lines = resumed_run(directory, steps=run.steps, change=run.change, options=options, what=what, allow=allow)
    for line in lines:
        print(f"note: {line}", file=sys.stderr)
    return config, directory
