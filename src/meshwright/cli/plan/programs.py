"""`meshwright plan MODULE:FUNCTION` and `meshwright plan SCRIPT.py`: the plan of any JAX function."""

from __future__ import annotations

import json
import re

from meshwright.cli.calls import set_up, take_call
from meshwright.cli.plan.args import ProgramArgs
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError

NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w+)?( .*)?")
"""What a function or a script is named by: module:function, or FILE.py with a function's name or options."""


def print_program_plan(args: ProgramArgs) -> int:
    """Print the plan of a function; return 1 if nothing fits."""
    if args.on is None:
        raise MeshwrightError(f"{args.model} needs hardware: --on (on=…), as v5e:4x4")
    if not args.compiled.isdecimal():
        raise MeshwrightError(f"--compiled is {args.compiled!r}; it is a whole number, 0 to compile none")
    system = parse_system(args.on)
    set_up(args.model, system.num_devices)
    from meshwright.proof.programs.plan import plan_program

    options = {"on": system, "mesh": args.mesh, "num_compiled": int(args.compiled)}
    with waiting(f"planning {args.model} for {args.on}"):
        plan = take_call(args.model, lambda call: plan_program(call.function, *call.args, **options, **call.kwargs))
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        from meshwright.pictures.screens.programs import print_plan

        print_plan(plan)
    return 0 if plan.best.fits else 1
