"""The output of `meshwright fix`: the mesh, the shardings of arguments, the proof, and the diff of the files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.proof.program_plans.constraints import count_equal
from meshwright.proof.program_plans.edits import diff, spec_text
from meshwright.proof.program_plans.sources import read_source
from meshwright.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.compiler.shardy import Matmul
    from meshwright.proof.program_plans.constraints import Fix
    from meshwright.proof.program_plans.plan import ProgramPlan
    from meshwright.record import Record


def print_fix(fix: Fix, proof: Sequence[Matmul], compiled: Sequence[Record], changed: Mapping[Path, str]) -> None:
    """Print sharding constraints to add to a program, and the proof that they have the planned effect.

    Args:
        fix: the constraints.
        proof: the matmuls of the changed program, with the shardings that their results get, in the order of
            `fix.planned`.
        compiled: the program's records without and with the change; () if it was not compiled.
        changed: the new text of each changed file.
    """
    plan, added = fix.plan, len(fix.constraints)
    print(f"{plan.name} on {plan.system} · {added} constraint{'s' * (added != 1)} to add\n")
    degrees, names = tuple(plan.mesh.values()), tuple(plan.mesh)
    types = f"axis_types=(jax.sharding.AxisType.Auto,) * {len(degrees)}"
    print(f"  mesh = jax.make_mesh({degrees}, {names}, {types})")
    print("  jax.set_mesh(mesh)\n")
    by_spec: dict[str, list[str]] = defaultdict(list)
    for pattern, spec in _patterns(plan).items():
        by_spec[spec].append(pattern)
    rows = [[", ".join(patterns), spec] for spec, patterns in by_spec.items()]
    show(console(), table(["arguments", "in_shardings, and out_shardings of the state"], rows, left=(0, 1), folds=0))
    count, equal = len(fix.planned), count_equal(fix.planned, proof)
    rows = [["unchanged", f"{fix.before} of {count}"], ["changed", f"{equal} of {count}"], ["planned", str(count)]]
    columns = ["", "matmuls as planned"]
    if compiled:
        columns += ["compiled step", "memory"]
        for row, record in zip(rows, (*compiled, plan.compiled or plan.predicted), strict=True):
            row += [
                "–" if record.step_seconds is None else show_seconds(record.step_seconds),
                show_bytes(record.memory_bytes["peak"]),
            ]
    print()
    show(console(), table(columns, rows, left=(0,)))
    print(f"\n{'proved' if equal == count else 'not proved'}: {equal} of {count} matmuls as planned")
    pairs = zip(fix.planned, proof, strict=True)
    others = Counter((one.line, two.result, one.result) for one, two in pairs if one.result != two.result)
    for (line, found, planned), times in others.items():
        repeated = f", {times} times" if times > 1 else ""
        print(folded(f"{line or 'an installed package'}: {found}, planned {planned}{repeated}"))
    if others:
        print(folded("note: only arrays that your files assign to a name can get a constraint"))
    for at in fix.skipped if others else ():
        print(folded(f"note: {at} has several layouts, of which one constraint can say nothing"))
    if compiled and (compiled[0].step_seconds or 0.0) < (compiled[1].step_seconds or 0.0):
        print(folded("note: the unchanged program is faster, as compiled with the plan's shardings of its arguments"))
    for file, text in changed.items():
        print(f"\n{diff(file, read_source(file), text)}", end="")


def _patterns(plan: ProgramPlan) -> dict[str, str]:
    """Return the partition specs of the arguments as text, by path pattern, such as `*.query.kernel`.

    A pattern is the shortest suffix of an argument's path such that all arguments with this suffix have the same spec.
    Numbers in paths, such as those of layers, become `*`.
    """
    specs: dict[str, set[str]] = defaultdict(set)
    leaves: list[tuple[list[str], str]] = []
    for (path, _), sharding in zip(plan.program.arguments, plan.abstract().in_shardings, strict=True):
        parts = re.sub(r"\b\d+\b", "*", path).split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        leaves.append((ends, spec_text(sharding.spec)))
        for end in ends:
            specs[end].add(leaves[-1][1])
    found: dict[str, str] = {}
    for ends, spec in leaves:
        end = next((one for one in ends if len(specs[one]) == 1 and one != "*"), ends[-1])
        found[end if end == ends[-1] else f"*.{end}"] = spec
    return found
