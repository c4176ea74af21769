"""Shared by commands that run a model: its options, and progress bars while it is read and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from meshwright.cli.waiting import waiting
from meshwright.description.families.load import usual_seq_len
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.parameter_tree import num_parameters
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.options.declare import CompileCache, Mesh, option, positional
from meshwright.pictures.tables import console
from meshwright.planning.options import OUTPUT_LEN, PROMPT_LEN
from meshwright.planning.serving.search import best_serving_plan
from meshwright.units import show_count, show_seconds

if TYPE_CHECKING:
    from meshwright.execution.loading.library import Found
    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.serving.engine.engine import Engine


@dataclass(frozen=True)
class ModelArgs:
    """A model with its weights, and the devices it is put on."""

    model: Annotated[tyro.conf.Positional[Path], positional("DIR|RUN")]
    """A Hugging Face directory (config.json, safetensors), or one that `meshwright train` made."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware, as cpu:8 or h100:8. Default: the run's; needed for a directory."""
    mesh: Mesh = None
    """The mesh, as 1,2,1,1 or fsdp=2. Default: the run's, or fsdp over all devices."""
    adapter: Annotated[Path | None, option("DIRECTORY")] = None
    """Add these adapters, as PEFT writes them, to the weights of a directory. Default: none."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Format of parameters and matmuls. Default: that of the weights."""
    compile_cache: CompileCache = None
    """Where compiled programs are kept for later starts, at most 4 GiB, or off. Default: the user's cache."""


def note(line: str) -> None:
    """Print a line on stderr that is not part of the result."""
    print(f"note: {line}", file=sys.stderr)


def note_advised_mesh(found: Found, batch: int) -> None:
    """Note that no mesh was given, if `plan --serve decode` advises a faster one than the mesh that was taken.

    batch: the number of sequences that are decoded at once.
    """
    if found.run is not None and found.mesh == found.run.mesh:
        return  # A run stays on the mesh that it was given.
    longest = usual_seq_len(found.model)
    options = {
        "on": found.system,
        "batch": batch,
        "prompt_len": min(PROMPT_LEN, longest * 4 // 5),
        "output_len": min(OUTPUT_LEN, longest // 5),
        "dtype": found.dtype,
        "weight_dtype": found.params_dtype,
        "kv_dtype": found.dtype,
    }
    try:
        taken = best_serving_plan(found.model, "decode", options, mesh=found.mesh).predicted.step_seconds
        best = best_serving_plan(found.model, "decode", options)
    except MeshwrightError:
        return  # What cannot be planned may run all the same.
    advised = best.predicted.step_seconds
    if advised is not None and taken is not None and best.mesh != found.mesh and advised < taken:
        note(
            f"no mesh was given, so that all devices are along fsdp; for {show_count(batch, 'sequence')} at once"
            f" `meshwright plan --serve decode` advises --mesh {best.mesh}: {show_seconds(advised)} a token, and"
            f" {found.mesh} takes {show_seconds(taken)}"
        )


def load_with_bar(found: Found, compile_cache: str | None = None) -> LoadedModel:
    """Load a model, with a bar of the bytes read on a terminal. compile_cache: see `use_compile_cache`."""
    with waiting(f"starting {found.system}"):
        from meshwright.execution.runtime.compile_cache import use_compile_cache
        from meshwright.execution.runtime.devices import claim_devices

        claim_devices(found.system)
        use_compile_cache(compile_cache)
    return read_with_bar(found)


def read_with_bar(found: Found, on_note: Callable[[str], None] = note) -> LoadedModel:
    """Load a model onto devices that are already claimed; see `load_with_bar`."""
    if found.run:
        with waiting("reading the checkpoint"):
            return found.load(on_note=on_note)
    with byte_bar("reading the weights", num_parameters(found.model) * dtype_bytes(found.params_dtype)) as on_bytes:
        return found.load(on_note=on_note, on_bytes=on_bytes)


@contextmanager
def byte_bar(what: str, total: float) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal while `total` bytes are read or written; yields a function of the bytes of each part."""
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
