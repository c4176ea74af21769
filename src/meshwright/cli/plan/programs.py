"""`meshwright plan MODULE:FUNCTION`, `meshwright plan SCRIPT.py` and `meshwright plan resnet50`: any JAX function."""

from __future__ import annotations

import json
import re

from meshwright.cli.calls import program_options, take_call
from meshwright.cli.plan.args import ProgramArgs
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.families.load import RESNETS
from meshwright.errors import MeshwrightError
from meshwright.options.values import read_count

NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w+)?( .*)?")
"""Matches a function or a script: module:function, or FILE.py with a function's name or options."""


def print_program_plan(args: ProgramArgs) -> int:
    """Print the plan of a function; return 1 if nothing fits."""
    options, as_json, resnet = program_options(args), args.json, args.model.lower()
    batch = None
    if resnet in RESNETS:
        if args.batch is None:
            raise MeshwrightError(f"{args.model} needs --batch, its images over all devices, as 256")
        batch = read_count("--batch", args.batch)
    check_all_read(args, f"with {args.model}")
    from meshwright.proof.program_plans.plan import plan_program

    with waiting(f"planning {args.model} for {args.on}"):
        if batch is None:
            plan = take_call(args.model, lambda call: plan_program(call.function, *call.args, **options, **call.kwargs))
        else:
            from meshwright.examples.resnet import make

            is_simulated = options["on"].chip.kind == "cpu"
            step, arguments = make(resnet, batch, "float32" if is_simulated else "bfloat16")
            plan = plan_program(step, *arguments, **options)
    if as_json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        from meshwright.pictures.screens.programs import print_plan

        print_plan(plan)
    return 0 if plan.best.fits else 1
