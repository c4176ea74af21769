"""Fraction of full rate that links reach in a collective, by its bytes and the devices it spans.

GPUs: inside a node two constants for each chip, fitted to measured all-reduces (`benchmarks/gpu_products.py`); between
nodes the steps of NCCL's rings and trees, with the latencies that NCCL itself assumes. TPUs: the scaling book's
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.collective import CollectiveTime
from meshwright.planning.cost.rates.data_files import gpu_products
from meshwright.planning.cost.rates.efficiency import relative

TPU_LINK_SHARE = 0.95
"""An all-gather on v5e reaches about 95% of the links' bandwidth from 10 MB on 16 chips (scaling book, sharding)."""

NETWORK_SHARE = 0.94
"""Fraction for a node's network cards: 46 to 48 of 50 GB/s each (NVIDIA, github.com/NVIDIA/nccl-tests/issues/290)."""


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: the seconds of a step inside a node and between nodes, and the payload's share of bytes.

    NCCL src/graph/tuning.cc, `hwLat` in microseconds; of each 128 bytes LL128 carries 120.
    """

    near_seconds: float
    far_seconds: float
    share: float


RINGS = (Protocol(1.9e-6, 4.0e-6, 120 / 128), Protocol(3.4e-6, 14.0e-6, 1.0))
TREE = Protocol(1.25e-6, 8.5e-6, 0.92 * 120 / 128)
"""NCCL assumes 0.92 of a ring's bandwidth for a tree (src/graph/tuning.cc); only all-reduces have one."""


@dataclass(frozen=True)
class LinkFigures:
    """Constants of collectives inside a node: t = start_seconds + t at full rate / share."""

    start_seconds: float
    share: float


@cache
def link_figures(name: str) -> LinkFigures:
    """Return the figures of a GPU's links inside a node, or those of the GPU it borrows from (`relative`)."""
    return LinkFigures(**gpu_products()["links"][relative(name)])


def collective_efficiency(system: System, time: CollectiveTime) -> float:
    """Return the fraction of the links' full rate that a collective reaches, from 0 to 1.

    GPUs: the time at full rate over the achieved time, start-up included. TPUs: `TPU_LINK_SHARE`; `time` has their
    start-up as hop latency.
    """
    ideal = time.bandwidth_seconds
    if not ideal or system.chip.kind == "cpu":
        return 1.0
    if system.chip.kind == "tpu":
        return TPU_LINK_SHARE if time.binds.startswith("ICI") else 1.0
    figures = link_figures(system.chip.name)
    slowest = max(time.terms, key=lambda term: term.seconds)
    share = figures.share if slowest.link == "node" else NETWORK_SHARE
    return ideal / (figures.start_seconds + min(steps + ideal / (share * part) for steps, part in _ways(time)))


def _ways(time: CollectiveTime) -> Iterator[tuple[float, float]]:
    """Yield (seconds of sequential steps, fraction of full rate) of each NCCL algorithm across nodes.

    A ring of n devices in m nodes takes n - 1 steps, m - 1 of them between nodes; an all-reduce takes twice that. A
    tree goes up and down its levels. Steps inside a node are part of the measured start.
    """
    members, nodes = time.spread
    if nodes == 1 or time.kind in ("all-to-all", "collective-permute"):
        yield 0.0, 1.0
        return
    rounds, far = (2 if time.kind == "all-reduce" else 1), nodes - 1
    for ring in RINGS:
        yield rounds * ((members * nodes - 1 - far) * ring.near_seconds + far * ring.far_seconds), ring.share
    if time.kind == "all-reduce":
        levels = math.ceil(math.log2(nodes))
        yield 2 * ((members - 1) * TREE.near_seconds + levels * TREE.far_seconds), TREE.share
