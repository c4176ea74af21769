"""`meshwright fix MODULE:FUNCTION|SCRIPT`: a diff of sharding constraints that make a function compile to its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.cli.calls import program_options, take_call
from meshwright.cli.waiting import waiting
from meshwright.options.declare import Mesh, option, positional
from meshwright.support.files import write_file

if TYPE_CHECKING:
    from meshwright.proof.inspection.meshes import Call

EXAMPLES = (
    "meshwright fix my_module:make_step --on v5e:4x4",
    "meshwright fix 'train.py --steps 10' --on h100:8 --mesh data=2,model=4",
    "meshwright fix my_module:make_step --on v5e:4x4 --write",
)


@dataclass(frozen=True)
class Args:
    """Print a diff with the fewest sharding constraints that make your function compile to its plan.

    The changed files are loaded, traced and compiled as a proof. Exits with 1 if a matmul is not split as planned.
    """

    model: Annotated[str, positional("MODULE:FUNCTION|SCRIPT")]
    """A function without arguments that returns (step, its arguments), or a script, as for plan."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as v5e:4x4. Needed."""
    mesh: Mesh = None
    """Plan only this mesh, with axes of any names: data=4,model=4. Default: the best mesh."""
    compiled: Annotated[str, option("N")] = "3"
    """How many of the best layouts to compile; 0 compiles nothing, not even the change. Default: 3."""
    write: Annotated[bool, option()] = False
    """Write the changed files. Default: they are only printed, as a diff."""


def run(args: Args) -> int:
    """Plan the function, find constraints, lower the changed files to check them, and print the diff.

    Return 1 if the plan does not fit, or a matmul of the changed function is not split as planned; else 0.
    """
    options, is_written = program_options(args), args.write
    from meshwright.pictures.screens.fix import print_fix
    from meshwright.proof.compiler.shardy import matmul_shardings
    from meshwright.proof.inspection.functions import inspect
    from meshwright.proof.program_plans.constraints import fewest_constraints, lower_call, use_mesh
    from meshwright.proof.program_plans.edits import changed_files
    from meshwright.proof.program_plans.plan import plan_program
    from meshwright.proof.program_plans.sources import Marks

    marks = Marks()

    def find(call: Call) -> Any:
        plan = plan_program(call.function, *call.args, **options, **call.kwargs)
        return fewest_constraints(plan, call, marks.assignments), lower_call(plan, call)

    with waiting(f"planning {args.model} for {args.on}"):
        fix, given = take_call(args.model, find, marks.marked)
    changed = changed_files(fix.constraints)
    texts = {file.resolve(): text for file, text in changed.items()}

    def changed_source(file: Path, text: str) -> str:
        return texts.get(file.resolve(), text)

    with waiting(f"compiling the changed {args.model} for {args.on}"), use_mesh(fix.plan):
        lowered = take_call(args.model, lambda call: lower_call(fix.plan, call), changed_source)
        proof = matmul_shardings(lowered)
        is_compiled = bool(options["num_compiled"] and fix.constraints)
        both = [inspect(one, mesh=fix.plan.mesh, on=options["on"]).record for one in (given, lowered) if is_compiled]
    print_fix(fix, proof, both, changed)
    for file, text in changed.items() if is_written else ():
        write_file(file, text)
        print(f"written: {file}")
    return int(not (fix.plan.best.fits and fix.is_proved(proof)))
