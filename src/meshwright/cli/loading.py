"""Notes and progress bars for commands that run a model, while it is read and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from meshwright.cli.waiting import waiting
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.pictures.tables import console

if TYPE_CHECKING:
    from meshwright.execution.loading.library import Found
    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.serving.engine.engine import Engine


def note(line: str) -> None:
    """Print a line on stderr that is not part of the result."""
    print(f"note: {line}", file=sys.stderr)


def note_advised_mesh(found: Found, batch: int) -> None:
    """Print a note if another mesh is predicted to generate faster than the default one. batch: sequences at once."""
    from meshwright.execution.loading.advice import advised_mesh

    if line := advised_mesh(found, batch):
        note(line)


def load_with_bar(found: Found, compile_cache: str | None = None) -> LoadedModel:
    """Claim the devices and load a model onto them; a terminal shows a progress bar of the bytes read.

    compile_cache: see `use_compile_cache`.
    """
    with waiting(f"starting {found.system}"):
        from meshwright.execution.runtime.compile_cache import use_compile_cache
        from meshwright.execution.runtime.devices import claim_devices

        claim_devices(found.system)
        use_compile_cache(compile_cache)
    return read_with_bar(found)


def read_with_bar(found: Found, on_note: Callable[[str], None] = note) -> LoadedModel:
    """Load a model onto devices that are already claimed, with the bar of `load_with_bar`. on_note: prints a note."""
    if found.run:
        with waiting("reading the checkpoint"):
            return found.load(on_note=on_note)
    with byte_bar("reading the weights", num_parameters(found.model) * dtype_bytes(found.params_dtype)) as on_bytes:
        return found.load(on_note=on_note, on_bytes=on_bytes)


@contextmanager
def byte_bar(what: str, total: float) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal while `total` bytes are read or written. Yields a function that advances it by bytes."""
    if not sys.stderr.isatty():
        with waiting(what):
            yield lambda size: None
        return
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


def start_with_bar(engine: Engine) -> None:
    """Compile the programs of an engine and start it; a terminal shows a progress bar of the programs."""
    if not sys.stderr.isatty():
        model, layout = engine.model, engine.layout
        size = f"{layout.shards * layout.rows} sequences of {layout.context} tokens"
        with waiting(f"compiling {model.config.name} for {size}, {model.mesh_shape} on {model.system}"):
            engine.start()
        return
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        engine.start(lambda done, total: bar.update(task, completed=done, total=total))
