"""Starting the engine of a model, for `serve` and `generate --data`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from meshwright.cli.tables import console
from meshwright.cli.waiting import waiting

if TYPE_CHECKING:
    from meshwright.serving.engine import Engine


def start_with_bar(engine: Engine) -> None:
    """Compile the programs of an engine and start it, with a bar on a terminal."""
    if not sys.stderr.isatty():
        with waiting("compiling"):
            engine.start()
        return
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        engine.start(lambda done, total: bar.update(task, completed=done, total=total))
