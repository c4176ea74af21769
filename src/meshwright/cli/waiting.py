"""A line on the terminal while something takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from meshwright.cli.tables import console


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A line that says what is waited for and for how long so far; none where stderr is no terminal."""
    out = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield
