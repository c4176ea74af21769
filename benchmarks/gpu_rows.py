"""Shared by the benchmarks of a GPU that is here: its system, and rows that are measured in a process each."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def here() -> Any:
    """One GPU of the kind that is here."""
    import jax

    from meshwright.description.hardware.load import chip_names
    from meshwright.description.hardware.system import parse_system

    kind = jax.devices()[0].device_kind.lower()
    return parse_system(next(chip for chip in chip_names() if chip.split("-")[0] in kind) + ":1")


def measured_apart(names: Sequence[str], measure: Callable[..., list[Row]], *args: Any) -> Iterator[Row]:
    """Yield the rows of `measure(name, *args)`, a process for each name: the peak of its memory is its own.

    A name that fails is a row with its error, and ends no other.
    """
    spawn = multiprocessing.get_context("spawn")
    for name in names:
        mine, theirs = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_send, args=(theirs, measure, name, *args))
        child.start()
        theirs.close()
        try:
            rows = mine.recv()
        except EOFError:
            rows = [{"row": name, "error": "its process ended"}]
        child.join()
        yield from rows


def traced_kernels(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Run `run` under JAX's profiler; return how often each kernel of the GPU ran, and its seconds in all, by name."""
    import jax
    from jax.profiler import ProfileData

    from meshwright.execution.training.watch.trace import find_trace

    found: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        profile = ProfileData.from_file(str(find_trace(Path(folder))))
        for plane in profile.planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    count, seconds = found.get(event.name, (0, 0.0))
                    found[event.name] = count + 1, seconds + event.duration_ns / 1e9
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _send(to: Any, measure: Callable[..., list[Row]], name: str, *args: Any) -> None:
    try:
        rows = measure(name, *args)
    except Exception as error:  # Told as a row, so that the others are measured.
        rows = [{"row": name, "error": f"{type(error).__name__}: {str(error)[:2000]}"}]
    to.send(rows)
