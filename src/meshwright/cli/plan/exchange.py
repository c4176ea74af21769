"""`meshwright plan --import FILE` and `--export FRAMEWORK FILE`: settings of other frameworks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cli.plan.args import ImportArgs
from meshwright.cli.plan.screen import print_details, print_head, print_why
from meshwright.cli.typed import check_all_read
from meshwright.errors import MeshwrightError
from meshwright.pictures.tables import console, show, table
from meshwright.pictures.text import folded
from meshwright.planning.files import check_data_file
from meshwright.planning.plan import Plan

if TYPE_CHECKING:
    from meshwright.planning.exchange.imports import Imported


class Export(NamedTuple):
    """The framework and the file of --export."""

    framework: str
    path: Path


def read_export(words: tuple[str, ...]) -> Export | None:
    """Return the framework and file of `--export`; None without the option."""
    if not words:
        return None
    if len(words) != 2:
        raise MeshwrightError(
            f"--export {' '.join(words)} takes a framework and a file, as --export maxtext llama3.yml"
        )
    from meshwright.planning.exchange.export import export_table  # Only plans that are exported need these modules.

    export_table(words[0])
    return Export(words[0], Path(words[1]))


def export_plan(plan: Plan, export: Export | None, *, as_json: bool = False) -> None:
    """Write a plan as settings of another framework, if requested, and print the plan's fields that these lack."""
    if export is None:
        return
    unsaid = plan.export(export.framework, export.path)
    out = sys.stderr if as_json else sys.stdout
    print(folded(f"wrote {export.path}: {plan.mesh} as settings of {export.framework}"), file=out)
    for field, why in unsaid.items():
        print(folded(f"not in it: {field.rpartition('.')[2]}; {why}"), file=out)


def print_imported(args: ImportArgs) -> int:
    """Print the meaning of each option of a file, and the plan. Return 1 if it does not fit, else 0."""
    from meshwright.planning.exchange.imports import import_settings

    if args.on is None:
        raise MeshwrightError(f"{args.import_} needs hardware: --on, as v5p:4x4x4, h100:64 or cpu:8")
    imported = import_settings(
        args.import_,
        args.on,
        model=args.model,
        framework=args.framework,
        hardware=args.hardware,
        memory_headroom=args.memory_headroom,
    )
    plan, path, is_explained, as_json = imported.plan, args.output, args.explain, args.json
    if path is not None:
        check_data_file(path)
    check_all_read(args)
    if path is not None:
        plan.write(path)
    if as_json:
        print(json.dumps(_data(imported), indent=2))
    else:
        planned = imported.plan
        rows = [(meaning.theirs, meaning.ours) for meaning in imported.meanings]
        show(console(), table((imported.title, "here"), rows, left=(0, 1), folds=1))
        for reason, names in imported.nothing.items():
            print(folded(f"no effect here ({reason}): {', '.join(names)}"))
        print()
        print_head(planned)
        print_why(planned, is_explained=is_explained)
        print_details(planned, is_explained=is_explained)
        if planned.planned_only:
            print(folded(f"train: {planned.planned_only}"))
        if path is not None:
            print(folded(f"wrote {path}"))
    return 0 if plan.predicted.fits else 1


def _data(imported: Imported) -> dict[str, object]:
    """Return an import as plain data."""
    options = [{"option": one.option, "value": one.value, "means": one.ours} for one in imported.meanings]
    return {
        "framework": imported.framework,
        "options": options,
        "without_effect": dict(imported.nothing),
        "plan": imported.plan.to_json(),
    }
