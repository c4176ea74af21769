"""What the commands that run a model share: where it is, which devices it is put on, and a bar while it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from meshwright.cli.arguments import CompileCache, Mesh, option, positional
from meshwright.cli.tables import console
from meshwright.cli.waiting import waiting
from meshwright.hardware import dtype_bytes
from meshwright.step import Dtype, num_parameters

if TYPE_CHECKING:
    from meshwright.inference import LoadedModel
    from meshwright.loading import Found
    from meshwright.serving.engine import Engine


@dataclass(frozen=True)
class ModelArgs:
    """A model with its weights, and the devices it is put on."""

    model: Annotated[tyro.conf.Positional[Path], positional("DIR|RUN")]
    """A Hugging Face directory (config.json, safetensors), or one that `meshwright train` made."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as cpu:8 or h100:8. Default: that of the run; for a directory it is needed."""
    mesh: Mesh = None
    """The mesh, as 1,2,1,1 or fsdp=2. Default: that of the run, or all devices along fsdp."""
    adapter: Annotated[Path | None, option("DIRECTORY")] = None
    """Add these adapters, as PEFT writes them, to the weights of a directory. Default: none."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """What parameters are kept and products computed in. Default: that of the weights."""
    compile_cache: CompileCache = None
    """Where compiled programs are kept for later starts, at most 4 GiB, or off. Default: the user's cache."""


def note(line: str) -> None:
    """A line for the user that is no part of the result."""
    print(f"note: {line}", file=sys.stderr)


def load_with_bar(found: Found, compile_cache: str | None = None) -> LoadedModel:
    """Load a model; on a terminal with a bar of the bytes that are read. compile_cache: see `use_compile_cache`."""
    with waiting(f"starting {found.system}"):
        from meshwright.runtime import claim_devices, use_compile_cache

        claim_devices(found.system)
        use_compile_cache(compile_cache)
    return read_with_bar(found)


def read_with_bar(found: Found, on_note: Callable[[str], None] = note) -> LoadedModel:
    """Load a model onto devices that are claimed; see `load_with_bar`."""
    if found.run:
        with waiting("reading the checkpoint"):
            return found.load(on_note=on_note)
    with byte_bar("reading the weights", num_parameters(found.model) * dtype_bytes(found.params_dtype)) as on_bytes:
        return found.load(on_note=on_note, on_bytes=on_bytes)


@contextmanager
def byte_bar(what: str, total: float) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, for as long as something is read or written: to be called with the bytes of each part."""
    if not sys.stderr.isatty():
        with waiting(what):
            yield lambda size: None
        return
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


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
