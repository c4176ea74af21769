"""`meshwright plan MODULE:FUNCTION` and `meshwright plan SCRIPT.py`: the plan of any JAX function."""

from __future__ import annotations

import json
import re

from meshwright.cli.calls import program_options, take_call
from meshwright.cli.plan.args import ProgramArgs
from meshwright.cli.waiting import waiting

NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w+)?( .*)?")
"""Matches a function or a script: module:function, or FILE.py with a function's name or options."""


def print_program_plan(args: ProgramArgs) -> int:
    """Print the plan of a function; return 1 if nothing fits."""
    options = program_options(args)
    from meshwright.proof.program_plans.plan import plan_program

    with waiting(f"planning {args.model} for {args.on}"):
        plan = take_call(args.model, lambda call: plan_program(call.function, *call.args, **options, **call.kwargs))
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        from meshwright.pictures.screens.programs import print_plan

        print_plan(plan)
    return 0 if plan.best.fits else 1
