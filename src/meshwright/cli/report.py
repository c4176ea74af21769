"""`meshwright report`: write one HTML page about runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.options.declare import option, positional
from meshwright.pictures.text import next_line
from meshwright.support.files import check_output

EXAMPLES = (
    "meshwright report runs/first",
    "meshwright report runs/first runs/second -o both.html",
)


@dataclass(frozen=True)
class Args:
    """Write one HTML page about runs: curves, predicted and measured figures, memory, devices, goodput, data."""

    runs: Annotated[tuple[str, ...], positional("RUN…")]
    """Run directories of `meshwright train` or `mw.fit`; their curves are drawn in the same charts."""
    output: Annotated[Path, option("FILE", "-o")] = Path("report.html")
    """The page, which is self-contained. Default: report.html."""


def run(args: Args) -> int:
    """Write the page and print its path."""
    if not args.runs:
        raise MeshwrightError("report needs a run directory: meshwright report runs/first")
    check_output(args.output)
    with waiting("loading JAX"):
        from meshwright.execution.training.run_directory.run import holds_run
        from meshwright.pictures.report import report

    report(args.runs, args.output)
    print(f"{args.output}: {len(args.runs)} run{'s' * (len(args.runs) > 1)}")
    if holds_run(Path(args.runs[0])):
        verify = f"meshwright verify {shlex.quote(args.runs[0])}"
        print(next_line(verify, note="what was measured beside what is compiled"))
    return 0
