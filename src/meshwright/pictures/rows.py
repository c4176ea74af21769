"""Texts shared by screens and HTML pages: rows of collectives and buffers, file names, costs of findings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.record import Collective, merge
from meshwright.units import show_bytes, show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.execution.training.watch.profile import Profile
    from meshwright.proof.inspection.finding import Finding
    from meshwright.proof.inspection.inspection import Inspection
    from meshwright.proof.simulate.buffers import Buffer
    from meshwright.proof.verification.profiles import AxisBandwidth, ProfileRow

_MOST_BUFFERS = 20
_LONGEST_PATH = 40


def summary(found: Inspection) -> str:
    """Return a line of text on an inspection: the number of findings, the cost of the first, and the simulated step."""
    cost = found.findings[0].cost_seconds if found.findings else None
    says = found.summary
    if cost:
        says += f", the first of {show_seconds(cost)} a step"
    if found.schedule is not None:
        exposed = sum(move.exposed_seconds or 0.0 for move in found.collectives)
        says += f"   step {show_seconds(found.schedule.step_seconds)}, of it exposed communication"
        says += f" {show_seconds(exposed)}"
    return says


def add_up_equal(moves: Iterable[Collective]) -> list[Collective]:
    """Add up collectives of equal kind, axes, phase, note, lowerings and source; return the sums, largest first."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for move in moves:
        groups.setdefault((move.kind, move.axes, move.phase, move.note, move.lowerings, move.source), []).append(move)
    found = []
    for same in groups.values():
        (one,) = merge(same)
        arrays = list(dict.fromkeys(move.array for move in same if move.array))
        more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
        found.append(replace(one, source=same[0].source, array=arrays[0] + more if arrays else ""))
    return sorted(found, key=lambda move: -move.bytes)


def buffer_rows(buffers: Iterable[Buffer]) -> list[list[str]]:
    """Return a row of text for each of the largest buffers: [shape, bytes, count, kind, source].

    Equal buffers share a row; count is their number, bytes their sum.
    """
    same: dict[tuple[str, str, str], list[Buffer]] = {}
    for buffer in buffers:
        name = buffer.scope.replace("\\'", "'")  # the compiler escapes quotes in the path of an argument
        place = name if buffer.kind == "argument" or not buffer.source else buffer.source + f" ({name})" * bool(name)
        same.setdefault((str(replace(buffer.shape, layout="")), buffer.kind, place), []).append(buffer)
    sizes = {key: sum(buffer.num_bytes for buffer in found) for key, found in same.items()}
    largest = sorted(sizes, key=lambda key: -sizes[key])
    rows = [
        [shape, show_bytes(sizes[shape, kind, place]), str(len(same[shape, kind, place])), kind, file_name(place)]
        for shape, kind, place in largest[:_MOST_BUFFERS]
    ]
    if rest := largest[_MOST_BUFFERS:]:
        rows.append([f"{len(rest)} more", show_bytes(sum(sizes[key] for key in rest)), "", "", ""])
    return rows


def costs(finding: Finding) -> str:
    """Return a finding's cost as text, `costs 2.1 ms a step, 64.0 MB`; '' if unknown."""
    found = [show_seconds(finding.cost_seconds) + " a step"] if finding.cost_seconds else []
    found += [show_bytes(finding.bytes)] if finding.bytes else []
    return f"costs {', '.join(found)}" if found else ""


def file_name(source: str) -> str:
    """Return a source such as `path/file.py:line (scopes)` without its directories: `file.py:line (scopes)`."""
    path, space, scope = source.partition(" ")
    return f"{Path(path).name}{space}{scope}"


def short_path(source: str) -> str:
    """Return a source `path/file.py:line (scopes)` with its path from the working directory, or its last two parts."""
    path, space, scope = source.partition(" ")
    path = path.removeprefix(f"{Path.cwd()}{os.sep}")
    if len(path) > _LONGEST_PATH:
        path = "…/" + "/".join(Path(path).parts[-2:])
    return f"{path}{space}{scope}"


PROFILE_COLUMNS = (
    "collective",
    "over",
    "phase",
    "predicted",
    "compiled",
    "measured",
    "times",
    "predicted time",
    "measured time",
)
"""Columns of `profile_rows`. Predicted, compiled and measured are bytes per device and step; times are per step."""


def profile_rows(found: Sequence[ProfileRow]) -> list[tuple[str, ...]]:
    """Return the collectives of a profile as rows of text, with the columns `PROFILE_COLUMNS`."""

    def size(move: Collective | None) -> str:
        return "–" if move is None else show_bytes(move.bytes)

    def seconds(move: Collective | None) -> str:
        return "–" if move is None or move.seconds is None else show_seconds(move.seconds)

    return [
        (
            row.kind,
            "*".join(row.axes),
            row.phase,
            *(size(move) for move in (row.planned, row.compiled, row.measured)),
            "–" if row.measured is None else str(row.measured.count),
            seconds(row.planned),
            seconds(row.measured),
        )
        for row in found
    ]


BANDWIDTH_COLUMNS = ("over", "links", "sent", "predicted", "measured", "links at full rate")
"""Columns of `bandwidth_rows`: bytes that a device sends per step, and rates while it sends."""


def bandwidth_rows(found: Sequence[AxisBandwidth]) -> list[tuple[str, ...]]:
    """Return a row of text for the collectives over each set of mesh axes, with the columns `BANDWIDTH_COLUMNS`."""

    def rate(bytes_per_second: float | None) -> str:
        return "–" if bytes_per_second is None else show_rate(bytes_per_second, "B/s")

    return [
        (
            "*".join(one.axes),
            one.links,
            show_bytes(one.sent_bytes),
            *map(rate, (one.predicted, one.measured, one.links_rate)),
        )
        for one in found
    ]


def imbalance(profile: Profile) -> str:
    """Return sentences on how evenly the devices of a profile work; '' if the profile has no devices."""
    busy = [use["busy_seconds"] for use in profile.devices.values()]
    mean = sum(busy) / len(busy) if busy else 0.0
    if not mean:
        return ""
    first, last = profile.steps
    waits = min(use["busy_seconds"] / use["step_seconds"] for use in profile.devices.values())
    return (
        f"In steps {first} to {last} the busiest device works {show_percent(max(busy) / mean - 1)} longer than the"
        f" mean, and every device at least {show_percent(waits)} of the time. In a collective a device waits for the"
        " slowest too."
    )
