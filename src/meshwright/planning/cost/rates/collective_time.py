"""The time of a collective at the rate that its links achieve, for collectives of compiled programs and of plans."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from meshwright.description.hardware.fabric import MeshPlacement, Placement
from meshwright.description.hardware.slices import has_form
from meshwright.description.hardware.system import System
from meshwright.description.step.ir import Communicate
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.links import collective_efficiency
from meshwright.record import Collective, Kind


@lru_cache(maxsize=1 << 16)
def achieved_seconds(kind: Kind, nbytes: float, layout: MeshPlacement, axes: tuple[str, ...]) -> float:
    """Return the seconds of one run of a collective over some mesh axes, at the rate that its links achieve.

    Args:
        kind: the kind that the program runs (for a plan's collective use `planned_seconds`).
        nbytes: the bytes of `record.Collective`; for a permute, times the number of hops on a torus.
        layout: the mesh laid over its system.
        axes: the mesh axes over which it runs.
    """
    return _achieved(kind, nbytes, layout.system, layout.placement(axes))


def _achieved(kind: Kind, nbytes: float, system: System, placement: Placement) -> float:
    """Return the seconds of one run of a collective at the rate that the links of a placement achieve."""
    once = collective_seconds(kind, nbytes, placement)
    return max(once.bandwidth_seconds / collective_efficiency(system, once), once.latency_seconds)


def planned_seconds(move: Collective, layout: MeshPlacement) -> float:
    """Return the seconds per step of a planned collective, over all its runs, as the chip's compiler implements it.

    If the links of a torus form a ring, a collective matmul over tp sends one half of each shard in each direction. If
    the compiler replaces a reduce-scatter by an all-reduce inside each slice, slices still exchange only shards.
    """
    kind, nbytes, placement = move.kind, move.bytes / move.count, layout.placement(move.axes)
    if kind == "collective-permute" and move.axes == ("tp",):
        nbytes /= 2 if any(ring.is_wrapped for ring in placement.rings) else 1
    seconds = achieved_seconds(kind, nbytes, layout, move.axes)
    if runs_as_all_reduce(move, layout):
        inside = replace(placement, degree=_degree_inside(placement), crossings=())
        seconds = max(seconds, _achieved("all-reduce", nbytes, layout.system, inside))
    return move.count * seconds


def runs_as_all_reduce(move: Collective | Communicate, layout: MeshPlacement) -> bool:
    """Whether the compiler replaces a reduce-scatter or an all-gather by an all-reduce of the whole array.

    It then sends twice the bytes. The TPU compiler does so if the collective is over every chip of one or several
    slices whose form the chip's file names (`Torus.summed_scatters`, `Torus.summed_gathers`).
    """
    system, torus = layout.system, layout.system.chip.torus
    if torus is None or move.kind not in ("reduce-scatter", "all-gather"):
        return False
    form = torus.summed_gathers if move.kind == "all-gather" else torus.summed_scatters
    devices = math.prod(system.shape) * system.devices_per_chip
    return has_form(torus, system.shape, form) and _degree_inside(layout.placement(move.axes)) == devices


def stops_ops(move: Collective, layout: MeshPlacement) -> bool:
    """Whether no op runs beside a collective, because the compiler replaces it by an all-reduce among the ops."""
    torus = layout.system.chip.torus
    return torus is not None and not torus.sums_beside_ops and runs_as_all_reduce(move, layout)


def _degree_inside(placement: Placement) -> int:
    """Return how many devices of a collective's group are in one TPU slice."""
    return placement.chip_members * math.prod(ring.size for ring in placement.rings)
