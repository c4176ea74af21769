"""`meshwright plan MODULE:FUNCTION` and `meshwright plan SCRIPT.py`: the plan of any JAX function."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from meshwright.cli.plan.args import ProgramArgs
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.script import read_script, simulate_devices

if TYPE_CHECKING:
    from meshwright.proof.program_plans.plan import ProgramPlan

NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w+)?( .*)?")
"""What a function or a script is named by: module:function, or FILE.py with a function's name or options."""


def plan_program(args: ProgramArgs) -> int:
    """Print the plan of a function; return 1 if nothing fits."""
    if args.on is None:
        raise MeshwrightError(f"{args.model} needs hardware: --on (on=…), as v5e:4x4")
    if not args.compiled.isdecimal():
        raise MeshwrightError(f"--compiled is {args.compiled!r}; it is a whole number, 0 to compile none")
    system = parse_system(args.on)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs here; other processes compile
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    script = read_script(args.model)
    if script is not None and not script.takes_nothing():
        simulate_devices(system.num_devices)
    options = {"on": system, "mesh": args.mesh, "num_compiled": int(args.compiled)}
    with waiting(f"planning {args.model} for {args.on}"):
        plan = _of_script(script, options) if script and not script.takes_nothing() else _built(args.model, options)
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        from meshwright.pictures.screens.programs import print_plan

        print_plan(plan)
    return 0 if plan.best.fits else 1


def _of_script(script: Any, options: dict[str, Any]) -> ProgramPlan:
    """Plan a function that a script calls, with the arguments of that call."""
    from meshwright.proof.inspection.run_script import run_script
    from meshwright.proof.program_plans.plan import plan_program

    taken = run_script(script, lambda call: plan_program(call.function, *call.args, **options, **call.kwargs))
    print(f"{taken.name}: {taken.note}", file=sys.stderr)
    return taken.result


def _built(name: str, options: dict[str, Any]) -> ProgramPlan:
    """Plan what a function returns: a step and its arguments."""
    from meshwright.proof.compiler.load import load_function
    from meshwright.proof.program_plans.plan import plan_program

    build = load_function(name)
    wrong = f"{name} is a function without arguments that returns a step and the tuple of its arguments"
    try:
        step, step_args = build()
        step_args = tuple(step_args)
    except (TypeError, ValueError) as error:
        raise MeshwrightError(f"{wrong}: {error}") from error
    if not callable(step):
        raise MeshwrightError(f"{wrong}; it returned a {type(step).__name__} first")
    return plan_program(step, *step_args, **options)
