"""The formulas of a collective's time as text, and the values of their variables."""

from __future__ import annotations

import math

from meshwright.description.hardware.fabric import Crossing, Placement
from meshwright.planning.cost.rates.collective import Term
from meshwright.record import Kind


def collective_formula(kind: Kind, term: Term, placement: Placement) -> tuple[str, dict[str, float]]:
    """Return the formula of one term of a collective's time as a Python expression, and the values of its variables.

    V: bytes (not among the values). n: devices of a group (on a torus chips; in an all-to-all those on the slowest
    axis). m: devices of the group in one unit (such as a node), or in one chip of a torus. D: units that the group
    spans at a level of switches. s: groups that share the level's links. W: link bandwidth of a unit. B: bandwidth of
    the links that the worst-placed device of a torus uses. Bandwidths are in bytes per second one way. Source: as in
    `cost.rates.collective`.
    """
    crossing = next((crossing for crossing in placement.crossings if crossing.level == term.link), None)
    text, numbers = _on_level(kind, placement, crossing) if crossing else _on_torus(kind, placement)
    return ("2 * " if kind == "all-reduce" else "") + text, numbers


def _on_level(kind: Kind, placement: Placement, crossing: Crossing) -> tuple[str, dict[str, float]]:
    """Return the formula of a collective's time at one level of switches, and the values of its variables."""
    bytes_sent, shared = ("V * s", {"s": crossing.sharers}) if crossing.sharers > 1 else ("V", {})
    rate = {"W": crossing.link_bytes_per_second}
    if kind == "collective-permute":
        return f"{bytes_sent} / W", shared | rate
    if kind == "all-to-all":
        numbers = {"m": crossing.members, "n": placement.degree}
        return f"{bytes_sent} * m * (n - m) / (n * W)", numbers | shared | rate
    return f"{bytes_sent} * (D - 1) / (D * W)", {"D": crossing.degree} | shared | rate


def _on_torus(kind: Kind, placement: Placement) -> tuple[str, dict[str, float]]:
    """Return the formula of a collective's time on a torus, and the values of its variables.

    A device uses two links along a ring; the device at the end of a line uses one. An all-to-all takes as long as on
    its slowest axis.
    """
    rates = {ring: ring.link_bytes_per_second * (2 if ring.is_wrapped else 1) for ring in placement.rings}
    if kind == "collective-permute":
        return "V / B", {"B": min(ring.link_bytes_per_second for ring in rates)}
    if kind == "all-to-all":
        slowest = max(rates, key=lambda ring: (ring.size**2 // 4) / ring.size / rates[ring])
        many = {"m": placement.chip_members} if placement.chip_members > 1 else {}
        return f"V{' * m' if many else ''} * (n**2 // 4) / (n * B)", {"n": slowest.size} | many | {"B": rates[slowest]}
    size, rate = math.prod(ring.size for ring in rates), sum(rates.values())
    is_ring = len(rates) == 1 and placement.rings[0].is_wrapped
    return "V * 2 * (n // 2) / (n * B)" if is_ring else "V * (n - 1) / (n * B)", {"n": size, "B": rate}
