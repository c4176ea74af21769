"""`meshwright train`: a run from its first step, or on from its last checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.cli.common import Subject, choose_plan
from meshwright.cli.devices import Processes, claim_devices
from meshwright.cli.tables import console, headline, speed
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.mesh import MeshShape, parse_mesh
from meshwright.planner import Plan, as_run, make_plan
from meshwright.record import Record
from meshwright.units import show_percent, show_rate, show_seconds
from meshwright.workload import (
    DEFAULT,
    Attention,
    Dtype,
    MatmulDtype,
    SequenceMethod,
    Strategy,
    without_effect,
)

if TYPE_CHECKING:
    from meshwright.training import RunConfig


@dataclass(frozen=True)
class Way:
    """How a step is run; what is left out is as a plan's file says, or as usual."""

    num_microbatches: int | None = None
    """Parts of a device's batch that run one after the other, their gradients summed over devices once."""
    schedule: Literal["gpipe", "1f1b"] | None = None
    """In which order microbatches go through the stages of pp (1f1b)."""
    virtual_stages: int | None = None
    """The chunks of layers of each stage; with several the schedule is interleaved (1)."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What fsdp shards: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too (3)."""
    attention: Attention | None = None
    """Scores that go through memory; flash, a fused kernel, or blocks where a chip has none; cuDNN's (scores)."""
    sequence: SequenceMethod | None = None
    """How queries meet the keys of a sequence that sp splits; ring and ulysses want flash, and bring it (gather)."""
    sequence_parallel: bool | None = None
    """Whether tp splits the stream between products too (yes)."""
    overlaps_tp: bool | None = None
    """Whether collectives over tp run chunk by chunk beside the products that need them (no)."""
    optimizer: Literal["adamw", "lion", "adafactor", "sgd"] | None = None
    """What makes updates of gradients (adamw)."""
    moment_dtype: Dtype | None = None
    """What moments are kept in between steps (as parameters)."""
    param_dtype: Dtype | None = None
    """What parameters are kept in (f32)."""
    master_weights: bool | None = None
    """Whether the optimizer updates float32 copies of narrower parameters (no)."""
    gradient_dtype: Dtype | None = None
    """What gradients are summed over devices in (as products are made in)."""
    matmul_dtype: MatmulDtype | None = None
    """What operands of the layers' products are rounded to, by qwix: pip install meshwright[quantized] (not at all)."""
    dropout: float | None = None
    """The share dropped at random of what attention and mlp add to the stream, and of attention's weights (0)."""

    def of(self, plan: Plan) -> Plan:
        """The plan, run in this way; a way that does not run is an error."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        if not said:
            return plan
        if said.get("sequence", "gather") != "gather":
            said.setdefault("attention", "flash")
        workload = replace(plan.workload, param_dtype=said.pop("param_dtype", plan.workload.param_dtype))
        return as_run(make_plan(workload, plan.mesh, plan.system, replace(plan.strategy, **said)))


@dataclass(frozen=True)
class Args:
    """Train a model on a mesh: a progress bar, and a run directory with config, metrics and checkpoints.

    Example: meshwright train tiny --on cpu:8 --mesh-dim 1,2,4,1 --batch 16 --seq-len 256 --steps 200
    Go on: meshwright train runs/tiny --resume --steps 400 (on another mesh: --on cpu:4 --mesh-dim 1,4,1,1)
    As one of two processes: ... --coordinator localhost:1234 --num-processes 2 --process-id 0
    """

    subject: Annotated[Subject, tyro.conf.arg(name="")]
    mesh_dim: str | None = None
    """dp,fsdp,tp,sp as 1,-1,4,1, or names, as fsdp=-1,tp=4. One degree may be -1. Without it, the planner chooses."""
    steps: int = 200
    """The steps of the whole run, those before a --resume included."""
    out: Path | None = None
    """The run directory; runs/MODEL where nothing is said."""
    resume: bool = False
    """Go on from the last checkpoint of the run directory that stands in the model's place."""
    data: tuple[str, ...] = ()
    """Text files, or folders of .txt, .md and .py; without any, the sources of Python's standard library."""
    learning_rate: float = 3e-3
    """The rate that the warm-up ends at; it then falls to a tenth."""
    save_every: int = 0
    """Steps between checkpoints; 0 keeps the last only."""
    way: Annotated[Way, tyro.conf.arg(name="")] = field(default_factory=Way)
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)
    seed: int = 0
    """Decides the first parameters and the order of the data."""
    json: bool = False
    """Print the measured record instead of the bar."""


def run(args: Args) -> int:
    """Train, and print what was measured beside what was planned."""
    from meshwright.training import is_first_process, train

    config, directory = (_resumed if args.resume else _begun)(args)
    system = parse_system(config.hardware)
    claim_devices(system, args.processes)
    plan = make_plan(config.workload, config.mesh, system, config.strategy).predicted
    is_first = is_first_process()
    if is_first and not args.json:
        print(f"{headline(config.workload, config.hardware)}\nmesh {config.mesh} · plan: {speed(plan)}", flush=True)
    with _bar(config.steps, plan, is_quiet=args.json or not is_first) as on_step:
        record = train(config, directory, on_step=on_step)
    if not is_first:
        return 0
    if args.json:
        print(json.dumps(record.to_json(), indent=2))
    else:
        print(f"measured: {speed(record)}   (plan: {speed(plan)})\n next   meshwright generate {directory}")
    return 0


def _begun(args: Args) -> tuple[RunConfig, Path]:
    """A new run's config, and its directory, which must not hold one already."""
    from meshwright.training import Optimizer, RunConfig, load_corpus

    load_corpus(args.data)  # A file that is not there is told of before anything starts.
    plan = args.way.of(as_run(choose_plan(args.subject, args.mesh_dim)))
    directory = args.out or Path("runs") / plan.workload.model.name
    if (directory / "config.json").exists():
        raise MeshwrightError(
            f"{directory} holds a run; `meshwright train {directory} --resume` goes on with it, --out starts another"
        )
    config = RunConfig(
        workload=plan.workload,
        mesh=plan.mesh,
        hardware=plan.hardware,
        optimizer=Optimizer(learning_rate=args.learning_rate, decay_steps=args.steps),
        steps=args.steps,
        seed=args.seed,
        data=args.data,
        save_every=args.save_every,
        strategy=plan.strategy,
    )
    return config, directory


def _resumed(args: Args) -> tuple[RunConfig, Path]:
    """The config of the run in the model's place, with the steps, hardware and mesh that the arguments change."""
    from meshwright.training import read_config

    if said := [name for name, value in vars(args.way).items() if value is not None]:
        raise MeshwrightError(f"--{said[0].replace('_', '-')} is for a new run; one that goes on keeps its way")
    directory = Path(args.subject.model)
    before = read_config(directory)
    system = parse_system(args.subject.on or before.hardware)
    changed = args.mesh_dim is not None or str(system) != before.hardware
    mesh = parse_mesh(args.mesh_dim or "dp=1,fsdp=-1", num_devices=system.num_devices) if changed else before.mesh
    steps = max(args.steps, before.steps)
    changes = {"hardware": str(system), "mesh": mesh, "steps": steps, "save_every": args.save_every}
    return replace(before, strategy=_kept_way(before, mesh), **changes), directory


def _kept_way(before: RunConfig, mesh: MeshShape) -> Strategy:
    """The strategy of a run as it goes on on a mesh: what changes nothing there is left out, and said."""
    idle = without_effect(before.workload, mesh, before.strategy)
    for name, reason in idle.items():
        print(f"{name}={getattr(before.strategy, name)!r} is left out on {mesh}: {reason}", file=sys.stderr)
    return replace(before.strategy, **{name: getattr(DEFAULT, name) for name in idle})


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
