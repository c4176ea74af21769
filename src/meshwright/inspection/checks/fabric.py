"""A mesh whose axes lie on the fabric so that collectives run over the wrong links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from meshwright.cost import achieved_seconds
from meshwright.errors import MeshwrightError
from meshwright.hardware import Layout, lay_mesh
from meshwright.inspection.finding import Finding
from meshwright.inspection.subject import Subject
from meshwright.record import Collective, merge
from meshwright.units import show_seconds

_SAVED = 0.1
"""The share of all collectives' time that another order of the axes must save to be worth a word."""

_LEAST_SECONDS = 1e-5
"""Orders that differ by less than this differ by a few hops."""


def mesh_against_fabric(subject: Subject) -> Iterator[Finding]:
    """An order of the same mesh axes in which the program's collectives take much less time."""
    if subject.layout is None or subject.system is None or subject.system.chip.kind == "cpu":
        return
    moves = merge(move.collective for move in subject.moves if move.collective.axes)
    live = [(axis, degree) for axis, degree in subject.mesh.items() if degree > 1]
    now = _seconds(subject.layout, moves)
    best, seconds = subject.layout, now
    for order in permutations(live):
        try:
            layout = lay_mesh(subject.system, dict(order))
        except MeshwrightError:  # slices that do not divide these outermost axes
            continue
        if (taken := _seconds(layout, moves)) < seconds:
            best, seconds = layout, taken
    if now - seconds < max(_SAVED * now, _LEAST_SECONDS):
        return
    worst = max(moves, key=lambda move: _seconds(subject.layout, [move]) - _seconds(best, [move]))  # type: ignore[arg-type]
    yield Finding(
        kind="mesh against the fabric",
        evidence=f"collectives take {show_seconds(now)} a step on this mesh and {show_seconds(seconds)} with its axes"
        f" in the order {_named(best.degrees)}; most of it the {worst.kind} over {'*'.join(worst.axes)}, now on"
        f" {subject.layout.placement(worst.axes)}, then on {best.placement(worst.axes)}",
        bytes=worst.bytes,
        seconds=now - seconds,
        source="",
        fix=f"make the mesh as {_named(best.degrees)}, outermost first",
    )


def _seconds(layout: Layout, moves: list[Collective] | tuple[Collective, ...]) -> float:
    """The time of all collectives on one layout."""
    return sum(m.count * achieved_seconds(m.kind, m.bytes / m.count, layout, m.axes) for m in moves)


def _named(degrees: Mapping[str, int]) -> str:
    """A mesh as people type it."""
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
