"""The time of a collective at the rate that its links achieve, for collectives of compiled programs and of plans."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from meshwright.description.hardware.fabric import MeshPlacement, Placement
from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.links import collective_efficiency
from meshwright.record import Collective, Kind

_LEAST_CHIPS = 16
"""The chips of the smallest slice whose reduce-scatters run as all-reduces.

On v5e and v6e the slice must be square; on v5p it may have any shape.
"""


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
    if reduce_scatter_runs_as_all_reduce(move, layout):
        inside = replace(placement, degree=_degree_inside(placement), crossings=())
        seconds = max(seconds, _achieved("all-reduce", nbytes, layout.system, inside))
    return move.count * seconds


def reduce_scatter_runs_as_all_reduce(move: Collective, layout: MeshPlacement) -> bool:
    """Whether a collective is a reduce-scatter that the compiler replaces by an all-reduce and a local slice.

    It then sends twice the bytes. The TPU compiler (libtpu 0.0.42.1) does so if a reduction is over every chip of one
    or several TPU slices: on v5e and v6e for square slices from 4x4 on, on v5p from 2x2x4 on
    (`benchmarks/whole_slice_sums.py`). Other chips were not tried.
    """
    if move.kind != "reduce-scatter":
        return False
    system = layout.system
    chips = system.num_chips // system.num_slices
    if chips < _LEAST_CHIPS or _degree_inside(layout.placement(move.axes)) != chips * system.devices_per_chip:
        return False
    if system.chip.name in ("v5e", "v6e"):
        return system.shape[0] == system.shape[1]
    return system.chip.name == "v5p"


def _degree_inside(placement: Placement) -> int:
    """Return how many devices of a collective's group are in one TPU slice."""
    return placement.chip_members * math.prod(ring.size for ring in placement.rings)
