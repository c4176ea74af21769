"""Take training steps and measure each one, without making the devices wait for the host.

The measurements of a step are its row. `step_seconds` is the time from when the devices could begin the step until they
finished it, without compile time (`compile_seconds`). `input_seconds` is the time that the devices waited for the next
batch: at most the time to produce it, and 0 if it was ready before the devices were done.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax import Array

from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.run_directory.run import Row


class BatchSource(Protocol):
    """Returns the batch of a step by its number, counted from 0."""

    def __getitem__(self, step: int) -> Any: ...


@dataclass
class _Pending:
    """A step that was dispatched to the devices and whose metrics are not read yet."""

    step: int
    metrics: dict[str, Array]
    began: float  # When it was dispatched, on the clock `time.perf_counter`, plus compile time.
    compile_seconds: float
    input_seconds: float = 0.0


def take_steps(
    program: StepProgram,
    batches: BatchSource,
    state: Any,
    steps: range,
    *,
    needs_state: Callable[[int], bool],
    runs_ahead: bool,
) -> Iterator[tuple[Row, Any]]:
    """Yield (row, state) for each step: its measurements, and the state after it.

    The state is None if the next step, which donates it, was already dispatched.

    Args:
        state: the state before the first step.
        steps: the numbers of the steps to take.
        needs_state: returns whether the state after a step is needed; after the last step it always is.
        runs_ahead: dispatch each step before reading the metrics of the previous one, so that devices are never idle.
            False for simulated devices: they share cores, and collectives of overlapping steps would time out.
    """
    pending: _Pending | None = None
    ready = -float("inf")
    batch = batches[steps.start]
    for step in steps:
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
            state, metrics = program(state, batch)
        compile_seconds = program.compile_seconds
        new = _Pending(step, metrics, began + compile_seconds, compile_seconds)
        if step + 1 < steps.stop:
            requested_at = time.perf_counter()
            batch = batches[step + 1]  # Read while the devices work.
            # If the devices are done by now, they were idle for some of that time.
            if all(value.is_ready() for value in jax.tree.leaves(metrics)):
                new.input_seconds = time.perf_counter() - requested_at
        if pending is not None:
            row, ready = _row(pending, ready)
            yield row, None
        pending = new
        if not runs_ahead or step + 1 == steps.stop or needs_state(step):
            row, ready = _row(pending, ready)
            pending = None
            yield row, state


def _row(pending: _Pending, ready: float) -> tuple[Row, float]:
    """Wait for a step. Return its row, and when the devices finished it, on the clock `time.perf_counter`.

    ready: when the devices finished the previous step.
    """
    metrics: dict[str, Any] = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
    now = time.perf_counter()
    row: Row = {"step": pending.step} | metrics
    row["step_seconds"] = now - max(pending.began, ready)
    row["input_seconds"] = min(pending.input_seconds, row["step_seconds"])
    if pending.compile_seconds:
        row["compile_seconds"] = pending.compile_seconds
    # Peaks since the process started. Not all runtimes report device memory; simulated devices use the host's.
    row["memory_peak_bytes"] = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    row["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB.
    return row | {"time": time.time()}, now
