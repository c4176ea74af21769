"""Meshes that put collectives on slow links, by the order of their axes or by crossing slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective_time import achieved_seconds
from meshwright.proof.inspection.checks.duplicate_gathers import LEAST_BYTES
from meshwright.proof.inspection.context import ProgramContext
from meshwright.proof.inspection.finding import Finding, FindingKind, joined
from meshwright.record import Collective, Kind, Phase, merge
from meshwright.units import show_bytes, show_degrees, show_seconds

_SAVED = 0.1
"""The smallest saving reported, as a fraction of the time of all collectives."""

_LEAST_SECONDS = 1e-5
"""The smallest saving reported, in seconds: smaller ones are a few hops of latency."""


@dataclass(frozen=True, kw_only=True)
class SlowMeshOrder(Finding):
    """Another order of the mesh axes would put collectives on faster links.

    seconds_now, seconds_then: the time of all collectives per step, in the present and in the better order. order: the
    better order, axes with degrees, outermost first. collective, axes: the collective that gains most. now, then: its
    links in the present and in the better order.
    """

    kind = FindingKind.MESH_ORDER

    seconds_now: float
    seconds_then: float
    order: tuple[tuple[str, int], ...]
    collective: Kind
    axes: tuple[str, ...]
    now: str
    then: str

    def _sentences(self) -> tuple[str, str]:
        order = show_degrees(dict(self.order))
        return (
            f"collectives take {show_seconds(self.seconds_now)} a step on this mesh and"
            f" {show_seconds(self.seconds_then)} with its axes in the order {order}; most of it the {self.collective}"
            f" over {joined(self.axes)}, now on {self.now}, then on {self.then}",
            f"make the mesh as {order}, outermost first",
        )


def mesh_order(context: ProgramContext) -> Iterator[Finding]:
    """Yield an order of the same mesh axes in which the program's collectives are much faster, if there is one."""
    if context.layout is None or context.system is None or context.system.chip.kind == "cpu":
        return
    moves = merge(move.collective for move in context.collectives if move.collective.axes)
    live = [(axis, degree) for axis, degree in context.mesh.items() if degree > 1]
    now = _seconds(context.layout, moves)
    best, seconds = context.layout, now
    for order in permutations(live):
        try:
            layout = lay_mesh(context.system, dict(order))
        except MeshwrightError:  # slices that do not divide these outermost axes
            continue
        if (taken := _seconds(layout, moves)) < seconds:
            best, seconds = layout, taken
    if now - seconds < max(_SAVED * now, _LEAST_SECONDS):
        return
    worst = max(moves, key=lambda move: _seconds(context.layout, [move]) - _seconds(best, [move]))  # type: ignore[arg-type]
    yield SlowMeshOrder(
        seconds_now=now,
        seconds_then=seconds,
        order=tuple(best.degrees.items()),
        collective=worst.kind,
        axes=worst.axes,
        now=str(context.layout.placement(worst.axes)),
        then=str(best.placement(worst.axes)),
        bytes=worst.bytes,
        cost_seconds=now - seconds,
        source="",
    )


@dataclass(frozen=True, kw_only=True)
class AcrossSlices(Finding):
    """A mesh axis that spans several slices, over which a step moves activations or weights, not only gradients."""

    kind = FindingKind.ACROSS_SLICES
    merged_by = ("axes",)
    is_merged_across_sources = True

    collective: Kind
    axes: tuple[str, ...]
    phase: Phase

    def _sentences(self) -> tuple[str, str]:
        over = joined(self.axes)
        return (
            f"{over} is split between slices, and the {self.collective} over it in {self.phase} crosses the data-centre"
            f" network, {show_bytes(self.bytes)} a device and step, where links are slowest",
            f"keep {over} inside of a slice: let an axis that only splits the batch (dp), whose gradients are summed"
            " once a step, be outermost and as large as there are slices",
        )


def across_slices(context: ProgramContext) -> Iterator[Finding]:
    """Yield axes that span slices, over which the forward pass gathers, reduces or exchanges; sends are no mistake."""
    for move in context.between_slices:
        if move.phase == "forward" and move.kind != "collective-permute" and move.bytes >= LEAST_BYTES * move.count:
            yield AcrossSlices(
                collective=move.kind,
                axes=move.axes,
                phase=move.phase,
                bytes=move.bytes,
                cost_seconds=move.seconds,
                source=move.source,
            )


def _seconds(layout: MeshPlacement, moves: list[Collective] | tuple[Collective, ...]) -> float:
    """Return the seconds per step of some collectives on a placement of the mesh."""
    return sum(m.count * achieved_seconds(m.kind, m.bytes / m.count, layout, m.axes) for m in moves)
