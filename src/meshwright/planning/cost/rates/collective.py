"""Time of a collective on its links, by the scaling book's formulas (jax-ml.github.io/scaling-book).

Bytes are those of `record.Collective.bytes`: the array on one device (the gathered result of an all-gather, the
unreduced operand of a reduce-scatter, the operand of the others). Times are lower bounds, with links at full rate; the
rates that links achieve are in `links`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.description.hardware.fabric import Crossing, Placement, Ring
from meshwright.record import Kind


@dataclass(frozen=True)
class Term:
    """The time for which a collective uses one part of the fabric.

    link: the part: the torus (`ICI`), or a level of switches such as `node`, `leaf` or `DCN`. text: the part in words.
    asymptotic_seconds: `seconds` with (n - 1) / n taken as 1, as for very many devices (the book's rules of thumb).
    """

    link: str
    seconds: float
    asymptotic_seconds: float
    text: str


@dataclass(frozen=True)
class CollectiveTime:
    """Time of one collective, determined by the slowest part of the fabric, since all parts work at the same time.

    bytes: size of the array on one device. terms: the time of each part. latency_seconds: time of all hops for an empty
    array. A permute adds it to the transfer; for other collectives both overlap, so it is a minimum (scaling book,
    sharding: a note on ICI latency). spread: (devices of a group in one GPU node, nodes that the group spans).
    """

    kind: Kind
    bytes: float
    terms: tuple[Term, ...]
    latency_seconds: float
    spread: tuple[int, int] = (1, 1)

    @property
    def bandwidth_seconds(self) -> float:
        """The seconds that the bytes take on the slowest part of the fabric."""
        return max((term.seconds for term in self.terms), default=0.0)

    @property
    def asymptotic_seconds(self) -> float:
        """`bandwidth_seconds` with (n - 1) / n approximated as 1, as in the book's rules of thumb."""
        return max((term.asymptotic_seconds for term in self.terms), default=0.0)

    @property
    def seconds(self) -> float:
        """The time of the collective: the longer of bandwidth and latency; for a permute their sum."""
        if self.kind == "collective-permute":
            return self.bandwidth_seconds + self.latency_seconds
        return max(self.bandwidth_seconds, self.latency_seconds)

    @property
    def regime(self) -> Literal["bandwidth", "latency"]:
        """Whether bytes or hops determine the time."""
        return "latency" if self.latency_seconds > self.bandwidth_seconds else "bandwidth"

    @property
    def binds(self) -> str:
        """The slowest part of the fabric, in words: `ICI x: ring of 4`, `leaf: 4 units`; empty inside one device."""
        if not self.terms:
            return ""
        slowest = max(self.terms, key=lambda term: term.seconds)
        return f"hop latency of {slowest.text}" if self.regime == "latency" else slowest.text


def collective_seconds(kind: Kind, nbytes: float, placement: Placement) -> CollectiveTime:
    """Return the time of one collective of `nbytes` over the mesh axes of a placement.

    A collective that spans several levels (torus and data-centre network; node, leaf, spine) runs level by level, and
    the levels overlap (scaling book, gpus, cross-node collectives). A group of one device takes no time.
    """
    if placement.degree == 1:
        return CollectiveTime(kind, nbytes, (), 0.0)
    on_torus = {"all-to-all": _exchange_on_torus, "collective-permute": _permute_on_torus}.get(kind, _gather_on_torus)
    terms = [on_torus(nbytes, placement)] if placement.rings else []
    terms += [_on_level(kind, nbytes, placement.degree, crossing) for crossing in placement.crossings]
    # Hops for an empty array: n / 2 in each ring of n devices, n - 1 in each line, log2 n at each level of switches
    # (scaling book, sharding: a note on ICI latency; gpus: tree reduction). A permute and an all-to-all make one hop at
    # a level; a permute makes one in a ring, and in a line the last device sends to the first, across the whole line.
    hops = 0.0
    for ring in placement.rings:
        far = ring.size // 2 if ring.is_wrapped else ring.size - 1
        hops += ring.stride * (1 if kind == "collective-permute" and ring.is_wrapped else far)
    latency = hops * placement.hop_seconds
    for crossing in placement.crossings:
        direct = kind in ("all-to-all", "collective-permute")
        latency += crossing.hop_seconds * (1 if direct else math.ceil(math.log2(crossing.degree)))
    if kind == "all-reduce":
        # A reduce-scatter and an all-gather (scaling book, sharding, case 3).
        terms = [Term(t.link, 2 * t.seconds, 2 * t.asymptotic_seconds, t.text) for t in terms]
        latency *= 2
    members = math.prod(crossing.degree for crossing in placement.crossings if crossing.level == "node")
    return CollectiveTime(kind, nbytes, tuple(terms), latency, (members, placement.degree // members))


def gather_bytes_per_second(placement: Placement) -> float:
    """Return the bytes per second of an all-gather or reduce-scatter: array bytes divided by asymptotic seconds.

    This is the W of the book's thresholds (`network_intensity`); infinite for a group of one device.
    """
    seconds = collective_seconds("all-gather", 1.0, placement).asymptotic_seconds
    return 1 / seconds if seconds else math.inf


def _gather_on_torus(nbytes: float, placement: Placement) -> Term:
    """Return the time of an all-gather or reduce-scatter on a torus (scaling book, sharding, case 2 and pop quiz 2).

    V is the bytes of the whole array, W the bandwidth of an axis in both directions. One ring of n devices passes
    shards both ways, in floor(n/2) hops of 2 V / n: V / W. On axes without wraparound (lines) the corner device has the
    fewest links and determines the time: V (n - 1) / n over one link of each line and two of each ring. Several rings
    take the book's V / (W n_axes).
    """
    rings, text = placement.rings, "ICI " + ", ".join(map(str, placement.rings))
    rate = sum(_links(ring) * ring.link_bytes_per_second for ring in rings)
    size = math.prod(ring.size for ring in rings)
    share = 2 * (size // 2) / size if len(rings) == 1 and rings[0].is_wrapped else (size - 1) / size
    return Term("ICI", nbytes * share / rate, nbytes / rate, text)


def _exchange_on_torus(nbytes: float, placement: Placement) -> Term:
    """Return the time of an all-to-all on a torus: the time of the slowest axis, because all axes work at once.

    In a line of n devices, the middle link carries n floor(n^2 / 4) / n^2 operands each way. In a ring, which has two
    ways between devices, each link carries half as much (V / 4W: scaling book, sharding, AllToAll).
    """
    terms: list[Term] = []
    for ring in placement.rings:
        chunk = nbytes * placement.chip_members * ring.size / (_links(ring) * ring.link_bytes_per_second)
        terms.append(Term("ICI", chunk * (ring.size**2 // 4) / ring.size**2, chunk / 4, f"ICI {ring}"))
    return max(terms, key=lambda term: term.seconds)


def _permute_on_torus(nbytes: float, placement: Placement) -> Term:
    """Return the time of a permute on a torus: the operand goes over one link of the slowest axis."""
    slowest = min(placement.rings, key=lambda ring: ring.link_bytes_per_second)
    seconds = nbytes / slowest.link_bytes_per_second
    return Term("ICI", seconds, seconds, f"ICI {slowest}")


def _on_level(kind: Kind, nbytes: float, degree: int, crossing: Crossing) -> Term:
    """Return the time of a collective of `degree` devices at one level of switches.

    Devices are grouped into units (GPUs of a node, nodes of a leaf); W is the bandwidth of a unit's link. An all-gather
    or reduce-scatter over D units takes V (D - 1) / (D W), times the number of groups that share the link: they hold
    other shards of an array that another axis shards too. In an all-to-all, a unit's devices send to all devices
    outside it: B (N - 1) / (N^2 W) in a node of N devices, B (M - 1) / (M^2 W) over M nodes, with B the bytes of all
    devices together. In a permute, one device of every group sends from each unit to the next. Scaling book, gpus:
    intra-node and cross-node collectives, and reductions when the array is sharded over a separate axis.
    """
    if kind == "all-to-all":
        limit = nbytes * crossing.members * crossing.sharers / crossing.link_bytes_per_second
        return Term(crossing.level, limit * ((degree - crossing.members) / degree), limit, str(crossing))
    limit = nbytes * crossing.sharers / crossing.link_bytes_per_second
    seconds = limit if kind == "collective-permute" else limit * (crossing.degree - 1) / crossing.degree
    return Term(crossing.level, seconds, limit, str(crossing))


def _links(ring: Ring) -> int:
    """Return how many links an axis has at the device with fewest: two in a ring, one at the end of a line."""
    return 2 if ring.is_wrapped else 1
