"""A profile of some steps: a trace for Perfetto and xprof, and the traced collectives next to the compiled ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.module import Module
from meshwright.description.hlo.parser import parse_hlo
from meshwright.errors import MeshwrightError
from meshwright.execution.training.program import StepProgram
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.watch.trace import DeviceTrace, MeasuredStep, find_trace, measured_step, read_trace
from meshwright.record import Record, record_from_json
from meshwright.support.files import write_file

FOLDER, FILE = "profile", "collectives.json"


@dataclass(frozen=True)
class ProfiledSteps:
    """First and last step of a profile, counted from 1; both are included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_profile(text: str) -> ProfiledSteps:
    """Parse the steps of a profile, such as `10:15`. A `MeshwrightError` if they are not two ascending steps from 1."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise MeshwrightError(f"profile is {text!r}; it is the first and the last step of a trace, as 10:15")
    return ProfiledSteps(int(found[1]), int(found[2]))


class Profiler:
    """Traces some steps of a run; each process traces its own devices. A context manager, which ends an open trace.

    Devices are idle when a trace begins and ends, so it contains whole steps only. The first process collects the
    results. Traces of one machine have the same name, so each other process writes its trace into a folder of its own.
    A profile that fails is reported in a note and never ends a run.

    Args:
        config: the config of the run, with the steps to trace (`watching.profile`).
        program: the step.
    """

    def __init__(
        self, directory: Path, config: RunConfig, program: StepProgram, start: int, on_note: Callable[[str], None]
    ) -> None:
        self._folder, self._config, self._program = directory / FOLDER, config, program
        number = jax.process_index()
        self._own_folder = self._folder / f"process-{number}" if number else self._folder
        self._on_note = on_note
        text = config.watching.profile
        self._steps = parse_profile(text) if text is not None else None
        self._is_tracing = False
        if self._steps is not None and not start < self._steps.first <= self._steps.last <= config.steps:
            if not (self._folder / FILE).is_file():
                on_note(f"steps {self._steps} are not profiled: this run takes steps {start + 1} to {config.steps}")
            self._steps = None
        self.after(start)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        """End a trace whose last step was not taken."""
        if self._is_tracing:
            with suppress(Exception):
                jax.profiler.stop_trace()

    def is_due(self, taken: int) -> bool:
        """Whether a trace begins or ends after `taken` steps."""
        return self._steps is not None and taken in (self._steps.first - 1, self._steps.last)

    def after(self, taken: int) -> None:
        """Begin or end the trace if it is due after `taken` steps; devices must be idle."""
        if self._steps is None:
            return
        if taken == self._steps.last:
            self._write()
        elif taken == self._steps.first - 1:
            if jax.process_index() == 0:  # Other processes write later: after steps in which this one takes part.
                shutil.rmtree(self._folder, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Tracing every Python call would slow the steps.
            with self._noted("the trace could not be begun"):
                jax.profiler.start_trace(self._own_folder, profiler_options=options)
                self._is_tracing = True

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Inside the context, report an exception of any type in a note that begins with `what`, and suppress it."""
        try:
            yield
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            self._on_note(f"{what}: {line}")

    def _write(self) -> None:
        """End the trace, and write its collectives and the compiled ones to `collectives.json`."""
        assert self._steps is not None
        own, module = {}, None
        with self._noted(f"the trace in {self._own_folder} could not be read"):
            if self._is_tracing:
                self._is_tracing = False
                jax.profiler.stop_trace()
                assert self._program.compiled is not None
                module = parse_hlo(self._program.compiled.as_text() or "")
                own = by_device(read_trace(find_trace(self._own_folder), module))
        # A collective: all processes call it, also those without a trace.
        frame = np.frombuffer(json.dumps(own).encode(), np.uint8)
        sizes = process_allgather(np.int32(frame.size))
        frames = process_allgather(np.pad(frame, (0, sizes.max() - frame.size)))
        devices, missing = join_traces(
            [json.loads(each[:size].tobytes()) for each, size in zip(frames, sizes, strict=True)]
        )
        if jax.process_index() == 0 and devices and module is not None:
            count = self._steps.last - self._steps.first + 1
            with self._noted(f"the collectives of steps {self._steps} could not be written"):
                found = measured_step(devices, module, self._config.mesh.layout, steps=count)
                data = _profile_data(self._config, self._steps, module, found, missing)
                write_file(self._folder / FILE, json.dumps(data, indent=2) + "\n")


def by_device(traces: Mapping[int, DeviceTrace]) -> dict[str, Any]:
    """Return {global device number as text: the fields of its `DeviceTrace`}, as plain data.

    traces: the traces of this process, by the device number in the trace file.

    Raises:
        MeshwrightError: a trace is of a device that this process does not have.
    """
    everywhere = jax.devices()
    # A trace numbers simulated devices by their id, which is unique over processes, others by their local hardware id.
    here = {
        device.id if device.platform == "cpu" else device.local_hardware_id: device for device in jax.local_devices()
    }
    if strange := traces.keys() - here.keys():
        raise MeshwrightError(f"it names device {min(strange)}, and this process has {sorted(here)}")
    return {str(everywhere.index(here[number])): asdict(trace) for number, trace in traces.items()}


def join_traces(of_processes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, DeviceTrace], int]:
    """Return ({global device number as text: trace}, number of processes without a trace).

    of_processes: the result of `by_device` in each process.
    """
    devices = {number: DeviceTrace(**trace) for each in of_processes for number, trace in each.items()}
    return devices, sum(not each for each in of_processes)


def _profile_data(
    config: RunConfig, steps: ProfiledSteps, module: Module, found: MeasuredStep, missing: int
) -> dict[str, Any]:
    """Return the contents of `collectives.json`: the fields of `Profile`.

    Args:
        module: the optimized HLO of the step.
        missing: number of processes without a trace.
    """
    mesh = config.mesh.layout  # HLO numbers devices in this order.
    compiled = Record(
        origin="compiled",
        mesh=mesh,
        hardware=config.hardware,
        collectives=read_collectives(module, mesh).collectives,
    )
    notes = [f"{found.not_seen} collectives of the program are not in the trace"] if found.not_seen else []
    if missing:
        notes.append(f"of {missing} of {jax.process_count()} processes there is no trace that could be read")
    measured = replace(compiled, origin="measured", collectives=found.collectives, notes=tuple(notes))
    return {
        "steps": [steps.first, steps.last],
        "compiled": compiled.to_json(),
        "measured": measured.to_json(),
        "devices": {name: asdict(use) for name, use in found.devices.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A stored profile: compiled and traced collectives, and how busy each device was."""

    steps: tuple[int, int]  # First and last traced step, from 1.
    compiled: Record
    measured: Record
    devices: dict[str, dict[str, float]]  # By global device number: the fields of `DeviceUse`.


def read_profile(directory: Path) -> Profile | None:
    """Read the profile of a run; None if it has none. A `MeshwrightError` if the file cannot be read."""
    path = directory / FOLDER / FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Profile(
            steps=(data["steps"][0], data["steps"][1]),
            compiled=record_from_json(data["compiled"]),
            measured=record_from_json(data["measured"]),
            devices=data["devices"],
        )
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except KeyError as error:
        raise MeshwrightError(f"{path} is not what a profile leaves: {error.args[0]} is missing") from None
    except (ValueError, TypeError) as error:
        raise MeshwrightError(f"{path} is not what a profile leaves: {str(error).splitlines()[0]}") from None


def find_profile(directory: Path, config: RunConfig) -> tuple[Profile | None, str]:
    """Return (profile of a run, "") if it is for the config's mesh and hardware, else (None, reason).

    The reason is what is wrong with a damaged file. It is empty if the run has no profile, or one for another mesh.
    """
    try:
        profile = read_profile(directory)
    except MeshwrightError as error:
        return None, f"the profile is left out: {error}"
    if profile is None or (profile.measured.mesh, profile.measured.hardware) != (config.mesh.degrees, config.hardware):
        return None, ""
    return profile, ""
