"""`meshwright.train`: a run from text or objects, from its first step or on from its last checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.planner import Count, PlanLike, PlanOptions, given, plan_to_run, read_count, read_mesh, read_system
from meshwright.record import Record
from meshwright.runtime import claim_devices
from meshwright.step import DEFAULT, unused_options
from meshwright.training.data import load_corpus
from meshwright.training.loop import Row, run_steps
from meshwright.training.optimizer import Optimizer
from meshwright.training.run import RunConfig, read_config

STEPS, LEARNING_RATE = 200, 3e-3
"""What a run takes where nothing is said."""

RESUMED = ("on", "mesh")
"""The options of a plan that a run which goes on may change."""


def train(
    what: PlanLike | RunConfig,
    directory: str | Path | None = None,
    *,
    steps: Count | None = None,
    resume: bool = False,
    data: tuple[str, ...] = (),
    learning_rate: float | None = None,
    save_every: int | None = None,
    seed: int | None = None,
    on_step: Callable[[Row], None] = lambda row: None,
    **options: Unpack[PlanOptions],
) -> Record:
    """Train a model on a mesh, and return what was measured.

    Args:
        what: a model's name or a ModelConfig, with at least `on` and `batch` among the options; a plan or its file; a
            RunConfig; with resume, the directory of a run.
        directory: of the run, for its config, metrics and checkpoints; `runs/MODEL` by default.
        steps: of the whole run, those before a resume included (200).
        data: text files, or folders of .txt, .md and .py; by default the sources of Python's standard library.
        learning_rate: at the end of the warm-up (0.003). save_every: steps between checkpoints; 0 keeps the last only.
        seed: decides the first parameters and the order of the data (0).
        on_step: called with the metrics of every step.
        options: the workload, the mesh and how a step is run, as `meshwright.plan` takes them (`PlanOptions`).

    Raises:
        MeshwrightError: where the run cannot be made, or its devices are not there.
    """
    settings = {"data": data or None, "learning_rate": learning_rate, "seed": seed}
    if isinstance(what, RunConfig):
        said = given(settings | {"steps": steps, "save_every": save_every} | dict(options), (*settings, *_NAMES))
        if said or resume or directory is None:
            wrong = (
                f"a RunConfig says {next(iter(said))} itself; leave it out" if said else "a RunConfig needs a directory"
            )
            raise MeshwrightError(wrong)
        return run_steps(what, Path(directory), on_step=on_step)
    if resume:
        if not isinstance(what, (str, Path)):
            raise MeshwrightError(f"resume goes on with the run in a directory, not with {what!r}")
        config, idle = resumed_run(Path(what), steps=steps, save_every=save_every, options=settings | dict(options))
        for message in idle:
            warnings.warn(message, stacklevel=2)
        directory = what
    else:
        plan = plan_to_run(what, options)
        directory = directory or Path("runs") / plan.workload.model.name
        config = new_run(plan, Path(directory), steps=steps, save_every=save_every, settings=settings)
    claim_devices(parse_system(config.hardware))
    return run_steps(config, Path(directory), on_step=on_step)


_NAMES = ("steps", "save_every", *PlanOptions.__annotations__)


def new_run(
    plan: Any, directory: Path, *, steps: Count | None, save_every: int | None, settings: Mapping[str, Any]
) -> RunConfig:
    """The config of a new run of a plan; a directory that holds a run is an error."""
    said = given(settings, ("data", "learning_rate", "seed"))
    load_corpus(said.get("data", ()))  # A file that is not there is told of before anything starts.
    if (directory / "config.json").exists():
        raise MeshwrightError(
            f"{directory} holds a run; `meshwright train {directory} --resume` goes on with it, -o starts another"
        )
    count = STEPS if steps is None else read_count("steps", steps)
    return RunConfig(
        workload=plan.workload,
        mesh=plan.mesh,
        hardware=plan.hardware,
        optimizer=Optimizer(learning_rate=said.get("learning_rate", LEARNING_RATE), decay_steps=count),
        steps=count,
        seed=said.get("seed", 0),
        data=tuple(said.get("data", ())),
        save_every=save_every or 0,
        strategy=plan.strategy,
    )


def resumed_run(
    directory: Path, *, steps: Count | None, save_every: int | None, options: Mapping[str, Any]
) -> tuple[RunConfig, list[str]]:
    """The config of a run as it goes on, with other steps, hardware or mesh, and a line for each option left out there.

    Any other option is an error: a run that goes on keeps what it began with.
    """
    said = given(options, ("data", "learning_rate", "seed", *PlanOptions.__annotations__))
    if others := [name for name in said if name not in RESUMED]:
        raise MeshwrightError(f"{others[0]} is for a new run; one that goes on keeps its own, leave it out")
    before = read_config(directory)
    system = read_system(said.get("on", before.hardware))
    mesh = before.mesh
    if "mesh" in said or str(system) != before.hardware:
        mesh = read_mesh(said.get("mesh", "dp=1,fsdp=-1"), system.num_devices)
    idle = unused_options(before.workload, mesh, before.strategy)
    lines = [
        f"{name}={getattr(before.strategy, name)!r} is left out on {mesh}: {reason}" for name, reason in idle.items()
    ]
    config = replace(
        before,
        hardware=str(system),
        mesh=mesh,
        steps=max(STEPS if steps is None else read_count("steps", steps), before.steps),
        save_every=save_every or 0,
        strategy=replace(before.strategy, **{name: getattr(DEFAULT, name) for name in idle}),
    )
    return config, lines
