"""`meshwright train`: a run from its first step, or on from its last checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.cli.arguments import Json, Mesh, StrategyArgs, WorkloadArgs, given_options, option, positional
from meshwright.cli.tables import console, headline, speed
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.planner import make_plan, plan_to_run
from meshwright.record import Record
from meshwright.units import show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.training import RunConfig


EXAMPLES = (
    "meshwright train tiny --on cpu:8 --mesh 1,2,4,1 --batch 16 --seq-len 256 --steps 200",
    "meshwright train plan.yaml -o runs/first",
    "meshwright train runs/tiny --resume --steps 400",
    "meshwright train runs/tiny --resume --steps 400 --on cpu:4 --mesh 1,4,1,1",
    "meshwright train plan.yaml --coordinator localhost:1234 --num-processes 2 --process-id 0",
)


@dataclass(frozen=True)
class RunArgs:
    """The run."""

    mesh: Mesh = None
    """fsdp=-1,tp=4, or dp,fsdp,tp,sp as 1,-1,4,1. One degree may be -1. Default: the planner chooses."""
    steps: Annotated[str | None, option("N")] = None
    """Steps of the whole run, those before a --resume included. Default: 200."""
    output: Annotated[Path | None, option("DIRECTORY", "-o")] = None
    """The run directory. Default: runs/MODEL."""
    resume: Annotated[bool, option()] = False
    """Go on from the last checkpoint of the run directory given as MODEL."""
    data: Annotated[tuple[str, ...], option("PATH…")] = ()
    """Text files, or folders of .txt, .md and .py. Default: the sources of Python's standard library."""
    learning_rate: Annotated[float | None, option("RATE")] = None
    """At the end of the warm-up; it then falls to a tenth. Default: 0.003."""
    save_every: Annotated[int, option("N")] = 0
    """Steps between checkpoints; 0 keeps the last only. Default: 0."""
    seed: Annotated[int | None, option("N")] = None
    """Decides the first parameters and the order of the data. Default: 0."""
    json: Json = False
    """Print the measured record instead of the bar."""


@dataclass(frozen=True)
class ProcessArgs:
    """Several processes of one run, all started with the same arguments. Default: one."""

    coordinator: Annotated[str | None, option("HOST:PORT")] = None
    """Where the processes meet: HOST:PORT of the first; auto where the cluster says it (Cloud TPU, Slurm)."""
    num_processes: Annotated[int | None, option("N")] = None
    """How many processes there are, each with as many of the devices."""
    process_id: Annotated[int | None, option("N")] = None
    """Which of them this is, from 0; the first writes the run directory and prints."""


@dataclass(frozen=True)
class Args:
    """Train a model on a mesh: a progress bar, and a run directory with config, metrics and checkpoints."""

    model: Annotated[tyro.conf.Positional[str], positional("MODEL")]
    """A preset (tiny, llama3-8b, …), the path of a Hugging Face config.json, a plan.yaml, or with --resume a run."""
    workload: WorkloadArgs = field(default_factory=WorkloadArgs)
    run: RunArgs = field(default_factory=RunArgs)
    strategy: StrategyArgs = field(default_factory=StrategyArgs)
    process: ProcessArgs = field(default_factory=ProcessArgs)

    @property
    def options(self) -> dict[str, Any]:
        """What is said of the plan."""
        return given_options(self.workload, self.strategy) | {"mesh": self.run.mesh}


def run(args: Args) -> int:
    """Train, and print what was measured beside what was planned."""
    from meshwright.runtime import Processes, claim_devices
    from meshwright.training import is_first_process, run_steps

    config, directory = (_resumed if args.run.resume else _begun)(args)
    system = parse_system(config.hardware)
    claim_devices(system, Processes(**vars(args.process)))
    plan = make_plan(config.workload, config.mesh, system, config.strategy).predicted
    is_first = is_first_process()
    if is_first and not args.run.json:
        print(f"{headline(config.workload, config.hardware)}\nmesh {config.mesh} · plan: {speed(plan)}", flush=True)
    with _bar(config.steps, plan, is_quiet=args.run.json or not is_first) as on_step:
        record = run_steps(config, directory, on_step=on_step)
    if not is_first:
        return 0
    if args.run.json:
        print(json.dumps(record.to_json(), indent=2))
    else:
        print(f"measured: {speed(record)}   (plan: {speed(plan)})\n next   meshwright generate {directory}")
    return 0


def _begun(args: Args) -> tuple[RunConfig, Path]:
    """A new run's config, and its directory, which must not hold one already."""
    plan = plan_to_run(args.model, args.options)
    directory = args.run.output or Path("runs") / plan.workload.model.name
    from meshwright.training import new_run

    run = args.run
    return new_run(plan, directory, steps=run.steps, save_every=run.save_every, settings=_settings(run)), directory


def _resumed(args: Args) -> tuple[RunConfig, Path]:
    """The config of the run in the model's place as it goes on; what is left out of it is said."""
    from meshwright.training import resumed_run

    if args.run.output is not None:
        raise MeshwrightError(f"a run that goes on stays in its directory; leave -o {args.run.output} out")
    directory, run = Path(args.model), args.run
    options = args.options | _settings(run)
    config, lines = resumed_run(directory, steps=run.steps, save_every=run.save_every, options=options)
    for line in lines:
        print(line, file=sys.stderr)
    return config, directory


def _settings(run: RunArgs) -> dict[str, Any]:
    """What is said of a new run alone."""
    return {"data": run.data or None, "learning_rate": run.learning_rate, "seed": run.seed}


@contextmanager
def _bar(steps: int, plan: Record, *, is_quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar, and what moves it: a row of metrics a step. Where there is no terminal, a line now and then."""
    columns = (
        TextColumn("step {task.completed:>5}/{task.total}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[state]}"),
        TimeRemainingColumn(),
    )
    out = console()
    with Progress(*columns, console=out, disable=is_quiet or not out.is_terminal) as progress:
        task = progress.add_task("", total=steps, state="compiling")

        def on_step(row: dict[str, Any]) -> None:
            rate = show_rate(row["tokens_per_second"], "tok/s")
            state = (
                f"loss {row['loss']:.3f}  {rate}  MFU {show_percent(row['mfu'])}"
                f"  {show_seconds(row['step_seconds'])} (plan {show_seconds(plan.step_seconds or 0.0)})"
            )
            progress.update(task, completed=row["step"] + 1, state=state)
            is_told = row["step"] == 0 or (row["step"] + 1) % max(1, steps // 10) == 0
            if is_told and not is_quiet and not out.is_terminal:
                out.print(f"step {row['step'] + 1:>5}/{steps}  {state}")

        yield on_step
