"""Read an existing plan from a plan's file or a run directory, for commands that accept both."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.waiting import waiting
from meshwright.description.notation.parser import parse_numbers
from meshwright.planning.files import is_run_directory
from meshwright.planning.plan import Plan, is_plan_file, read_plan


def kept_plan(text: str) -> Plan | None:
    """Return the plan in a file, or the plan of a run's step; None if the text names neither.

    Raises:
        MeshwrightError: the file or the run's config.json is damaged, or the plan is a serving plan.
    """
    if is_plan_file(text):
        return read_plan(Path(text))
    if not is_run_directory(text):
        return None
    with waiting("loading JAX"):
        from meshwright.execution.training.run_directory.run import read_config
    return read_config(Path(text)).plan


def mesh_degrees(text: str) -> dict[str, int]:
    """Return the degree of each mesh axis of --mesh, outermost first.

    The text is X=4,Y=2, or the path of a plan's file or a run, from which axes of degree 1 are left out.
    """
    plan = kept_plan(text)
    if plan is None:
        return parse_numbers(text)
    return {axis: degree for axis, degree in plan.mesh.layout.items() if degree > 1} or {"dp": 1}
