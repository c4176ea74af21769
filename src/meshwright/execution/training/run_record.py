"""Measurements of a run as a record, to compare with the record that the plan predicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from meshwright.execution.runtime.program_memory import program_memory
from meshwright.execution.training.run_directory.run import Row, RunConfig
from meshwright.execution.training.watch.profile import Profile
from meshwright.planning.cost.flops import model_flops
from meshwright.record import Record


def seconds_at_peak(config: RunConfig) -> float:
    """Return the seconds that a step's model flops (without recompute) take at the peak rate of all devices together.

    The MFU of a step is this time divided by the measured one.
    """
    return model_flops(config.workload) / (config.system.peak(config.workload.compute_dtype) * config.mesh.num_devices)


def measured(config: RunConfig, rows: Sequence[Row], profile: tuple[Profile | None, str] = (None, "")) -> Record:
    """Return the measured record of a run since it last started or resumed.

    Args:
        rows: all rows of its metrics.
        profile: the result of `find_profile`; the record gets the collectives that it measured.
    """
    here = [row for row in rows if (row["mesh"], row["hardware"]) == (str(config.mesh), config.hardware)]
    record = measured_steps(here, config.mesh.degrees, config.hardware)
    step, (found, note) = record.step_seconds, profile
    return replace(
        record,
        mfu=seconds_at_peak(config) / step if step else None,
        tokens_per_second=config.workload.tokens / step if step else None,
        collectives=found.measured.collectives if found else (),
        notes=(note,) if note else (),
    )


def measured_steps(rows: Sequence[Row], mesh: Mapping[str, int], hardware: str) -> Record:
    """Return the step time and peak memory of a run on one mesh, since it last started or resumed, as a record.

    The step time is the median over steps without the first one. The peak memory is that of one device.
    """
    here = [row for row in rows if row.get("began_at") == rows[-1].get("began_at")]
    times = [row["step_seconds"] for row in here[1:] or here]
    peaks = [row["memory_peak_bytes"] for row in here if row["memory_peak_bytes"] is not None]
    return Record(
        origin="measured",
        mesh=mesh,
        hardware=hardware,
        step_seconds=statistics.median(times) if times else None,
        memory_bytes={"peak": max(peaks)} if peaks else {},
    )


def compiled_record(compiled: jax.stages.Compiled, mesh: Mapping[str, int], hardware: str, *, on_tpu: bool) -> Record:
    """Return the memory of a compiled step, per device, as a record. The record has no collectives."""
    memory = program_memory(compiled, on_tpu=on_tpu)
    return Record(origin="compiled", mesh=mesh, hardware=hardware, memory_bytes=memory)
