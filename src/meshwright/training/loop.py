"""The training loop: steps from where a run stands to where it should end, kept track of in the run directory."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.cost import model_flops
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.record import Record
from meshwright.runtime import ShardingContext, build_mesh, token_order
from meshwright.step import check_mesh, check_runnable, check_strategy, rules_of
from meshwright.training.checkpoint import Checkpoints
from meshwright.training.data import BYTES, Batches, load_corpus
from meshwright.training.run import RunConfig, append_metrics, read_metrics, write_config
from meshwright.training.slots import in_order, to_order, to_slots
from meshwright.training.step import State, abstract_state, initial_state, train_step

Row = dict[str, Any]
"""What one step measured, a line of `metrics.jsonl`."""


def run_steps(config: RunConfig, directory: Path, *, on_step: Callable[[Row], None] = lambda row: None) -> Record:
    """Train until `config.steps` steps are taken, from the run's last checkpoint if it has one; the measured record.

    Interrupted (SIGINT or SIGTERM) it finishes the step it is in and saves; called again it goes on from there. The
    mesh may be another than the one before. `on_step` is told of every step. Of several processes, which all call this
    and see one directory, the first writes what is not a checkpoint, and has the record; an interruption is for all.
    """
    check_runnable(config.workload.config, config.mesh, config.strategy)
    check_mesh(config.workload, config.mesh)
    check_strategy(config.workload, config.mesh, config.strategy)
    if config.workload.config.vocab < BYTES:
        raise MeshwrightError(
            f"vocab {config.workload.config.vocab} is too small for text as bytes, which wants {BYTES}"
        )
    corpus = load_corpus(config.data)
    layout, mesh = ShardingContext(config.mesh, rules_of(config.strategy)), build_mesh(config.mesh)
    sharding = NamedSharding(mesh, layout.spec("batch", "sequence"))
    lies = token_order(config.workload.seq_len, layout, config.strategy)
    draws = config.strategy.dropout > 0
    batches = Batches(corpus, config.workload, sharding, seed=config.seed, order=lies, draws=draws)
    is_first = is_first_process()
    if is_first:
        write_config(directory, config)
    with jax.set_mesh(mesh), Checkpoints(directory) as checkpoints, _interruptions() as interrupted:
        start, first = _state(config, layout, mesh, checkpoints)
        if start >= config.steps:
            raise MeshwrightError(f"{directory} has taken {start} steps already; --steps {2 * start} would go on")
        for row, state in _steps(config, layout, batches, first, start):
            if is_first:
                append_metrics(directory, row)
            on_step(row)
            taken = row["step"] + 1
            if taken == config.steps or interrupted or (config.save_every and taken % config.save_every == 0):
                checkpoints.save(taken, _saved(config, layout, mesh, state))
            if interrupted:
                break
    return measured(config, read_metrics(directory))


def is_first_process() -> bool:
    """Whether this process writes and prints for all of a run's."""
    return jax.process_index() == 0


def _state(config: RunConfig, layout: ShardingContext, mesh: Mesh, checkpoints: Checkpoints) -> tuple[int, State]:
    """The steps taken so far, and the state after them."""
    if checkpoints.latest is None:
        return 0, initial_state(config.workload, layout, config.optimizer, mesh, config.strategy, seed=config.seed)
    wanted = abstract_state(config.workload, layout, config.optimizer, mesh, config.strategy)
    if (saved := _saved_layout(config, layout)) == layout:
        return checkpoints.latest, checkpoints.restore(checkpoints.latest, wanted)
    kept = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    back = jax.jit(lambda state: to_slots(state, wanted, config.workload.config, layout, config.strategy))
    return checkpoints.latest, back(checkpoints.restore(checkpoints.latest, kept))


def _saved(config: RunConfig, layout: ShardingContext, mesh: Mesh, state: State) -> State:
    """A state as checkpoints have it, its layers in their order, so that it is read on any mesh."""
    if (saved := _saved_layout(config, layout)) == layout:
        return state
    wanted = abstract_state(config.workload, saved, config.optimizer, mesh, config.strategy)
    return jax.jit(lambda state: to_order(state, wanted, config.workload.config, layout, config.strategy))(state)


def _saved_layout(config: RunConfig, layout: ShardingContext) -> ShardingContext:
    """How a state lies while it is written and read."""
    return in_order(layout, config.workload.config, config.strategy)


def _steps(
    config: RunConfig, layout: ShardingContext, batches: Batches, state: State, start: int
) -> Iterator[tuple[Row, State]]:
    """The row of each step from `start` on, and the state after it."""
    step_of = train_step(config.workload, layout, config.optimizer, config.strategy)
    rate: Callable[[int], Any] = config.optimizer.schedule()
    tokens, flops_at_peak = config.workload.tokens, _step_flops_at_peak(config)
    batch = batches[start]
    for step in range(start, config.steps):
        began = time.perf_counter()
        state, metrics = step_of(state, batch)
        batch = batches[step + 1]  # Read while the devices work.
        # Waiting for every step keeps simulated devices, which share cores, from timing out on each other.
        found = {name: value.item() for name, value in metrics.items()}
        seconds = time.perf_counter() - began
        where = {"mesh": str(config.mesh), "hardware": config.hardware}
        row = where | {"step": step} | found | {"learning_rate": np.asarray(rate(step)).item()}
        speed = {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": flops_at_peak / seconds}
        yield row | speed | {"memory_peak_bytes": _memory_peak()}, state


def _step_flops_at_peak(config: RunConfig) -> float:
    """The seconds a step would take at the hardware's peak, nothing recomputed: MFU is this over the time taken."""
    system = parse_system(config.hardware)
    return model_flops(config.workload) / (system.peak(config.workload.compute_dtype) * config.mesh.num_devices)


def measured(config: RunConfig, rows: Sequence[Row]) -> Record:
    """The record of a run: the median of its steps on the config's mesh, the one that compiled left out."""
    here = [row for row in rows if (row["mesh"], row["hardware"]) == (str(config.mesh), config.hardware)]
    times = [row["step_seconds"] for row in here[1:] or here]
    step = statistics.median(times) if times else None
    peaks = [row["memory_peak_bytes"] for row in here if row["memory_peak_bytes"] is not None]
    return Record(
        origin="measured",
        mesh=config.mesh.degrees,
        hardware=config.hardware,
        step_seconds=step,
        mfu=_step_flops_at_peak(config) / step if step else None,
        memory_bytes={"peak": max(peaks)} if peaks else {},
        tokens_per_second=config.workload.tokens / step if step else None,
    )


def _memory_peak() -> int | None:
    """The most bytes that were in use on a device so far, where its runtime counts them; simulated devices do not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """A list that is filled when the process is asked to stop; asked twice, it stops at once."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
