"""`meshwright train`: train a run from its first step, or from its last checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.train.args import Args
from meshwright.cli.train.dry_run import dry_run
from meshwright.cli.train.on_devices import train_on_devices
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.host import FAILED
from meshwright.planning.library import plan_to_run

if TYPE_CHECKING:
    from meshwright.execution.training.run_directory.run import RunConfig


EXAMPLES = (
    "meshwright train tiny --on cpu:8 --mesh 1,2,4,1 --batch 16 --seq-len 256 --steps 200",
    "meshwright train plan.yaml -o runs/first",
    "meshwright train runs/tiny --resume --steps 400",
    "meshwright train runs/tiny --resume --change --learning-rate 1e-3",
    "meshwright train runs/tiny --resume --steps 400 --on cpu:4 --mesh 1,4,1,1",
    "meshwright train plan.yaml -o runs/first --resume",
    "meshwright train plan.yaml --coordinator localhost:1234 --num-processes 2 --process-id 0",
)


def run(args: Args) -> int:
    """Train, and print measured and predicted figures.

    Returns: 0 if done or stopped by SIGTERM, 1 if it does not fit or could not continue, 130 if interrupted.
    """
    config, directory = _resumed(args) if args.run.resume else _begun(args)
    from meshwright.execution.training.checks import PlanDoesNotFitError, check_start
    from meshwright.execution.training.run_directory.run import RunStoppedError

    try:
        planned = check_start(config, anyway=args.run.anyway)
        if args.run.dry_run:
            return 0 if dry_run(args, config, planned) else FAILED
        return train_on_devices(args, config, directory, planned)
    except (PlanDoesNotFitError, RunStoppedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _begun(args: Args) -> tuple[RunConfig, Path]:
    """Return a new run's config, and its directory, which must not contain a run."""
    run = args.run
    for name in ("allow", "change"):
        if getattr(run, name):
            raise MeshwrightError(f"--{name} is for a run that continues (--resume), and this one begins; leave it out")
    plan = plan_to_run(args.model, args.options)
    directory = run.output if run.output is not None else Path("runs") / plan.workload.model.name
    with waiting("loading JAX"):
        from meshwright.execution.training.library import new_run

    with waiting("reading the data"):
        config = new_run(args.model, plan, directory, steps=run.steps, settings=args.settings)
    return config, directory


def _resumed(args: Args) -> tuple[RunConfig, Path]:
    """Return the config and directory of the run to resume, and print its changed settings.

    If the directory of -o has no run, return those of a new one.
    """
    with waiting("loading JAX"):
        from meshwright.execution.training.library import allowed_differences, run_to_resume
        from meshwright.execution.training.run_directory.resume import resumed_run

    run = args.run
    if (directory := run_to_resume(args.model, run.output)) is None:
        return _begun(args)
    what, options = None if run.output is None else args.model, args.options | args.settings
    allow = allowed_differences(run.allow, args.settings, change=run.change)
    config, lines = resumed_run(directory, steps=run.steps, change=run.change, options=options, what=what, allow=allow)
    for line in lines:
        print(f"note: {line}", file=sys.stderr)
    return config, directory
