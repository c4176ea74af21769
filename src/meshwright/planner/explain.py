"""Why: what binds the best mesh, and the one reason for which each of the others loses."""

from __future__ import annotations

import math

from meshwright.cost import gather_bytes_per_second, network_intensity
from meshwright.hardware import System, lay_mesh
from meshwright.mesh import MeshShape
from meshwright.record import Record
from meshwright.units import show_bytes, show_percent, show_seconds
from meshwright.workload import Workload, token_axes


def why(record: Record, workload: Workload, system: System) -> list[str]:
    """What decides the step of a mesh, a line each, with the numbers."""
    mesh = MeshShape(**record.mesh)
    lines = [line for line in (_gathers(mesh, workload, system), _exposed(record)) if line]
    return [f"why: {lines[0]}", *(f"     {line}" for line in lines[1:]), *(f"note: {note}" for note in record.notes)]


def _gathers(mesh: MeshShape, workload: Workload, system: System) -> str:
    """The tokens that a device has beside those that hide the gathers of its weights."""
    axes = tuple(axis for axis in token_axes() if mesh.degrees[axis] > 1)
    tokens = workload.tokens // mesh.degree(token_axes())
    if not axes:
        return f"{tokens:,} tokens a device, and no axis gathers weights or sums gradients"
    placement = lay_mesh(system, mesh.layout).placement(axes)
    wanted = network_intensity(system, gather_bytes_per_second(placement), dtype=workload.compute_dtype)
    verb = "hides" if tokens >= wanted else "does not hide"
    over = "*".join(axes)
    return f"{tokens:,} tokens a device {verb} weights and gradients over {over}, which want {math.ceil(wanted):,}"


def _exposed(record: Record) -> str:
    """What share of the step waits for the network."""
    exposed = record.breakdown_seconds["exposed communication"]
    share = exposed / (record.step_seconds or math.inf)
    if not exposed:
        return "no communication is exposed"
    amount = f"{show_seconds(exposed)} of communication is exposed, {show_percent(share)} of the step"
    return f"{amount}, most of it over {_dearest_axes(record)}"


def reason(record: Record, best: Record) -> str:
    """The one reason why `record` loses against `best`, in a few words with its numbers."""
    if not record.fits:
        return f"wants {show_bytes(record.memory_bytes['peak'])}"
    gaps = {name: time - best.breakdown_seconds.get(name, 0.0) for name, time in record.breakdown_seconds.items()}
    slowest = max(gaps, key=gaps.__getitem__)
    if record is best or gaps[slowest] <= 0:
        return "-" if record is best else "as fast, with less memory left"
    if slowest != "exposed communication":
        return f"{slowest} +{show_seconds(gaps[slowest])}"
    return f"{_dearest_axes(record)} communication exposed: +{show_seconds(gaps[slowest])}"


def _dearest_axes(record: Record) -> str:
    """The axes whose collectives are exposed longest."""
    times: dict[tuple[str, ...], float] = {}
    for move in record.collectives:
        times[move.axes] = times.get(move.axes, 0.0) + (move.exposed_seconds or 0.0)
    return "*".join(max(times, key=times.__getitem__))
