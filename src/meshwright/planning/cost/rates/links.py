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
from meshwright.planning.cost.rates.efficiency import related_gpu

TPU_LINK_SHARE = 0.95
"""Fraction of the ICI bandwidth that a collective reaches.

Measured for all-gathers of 10 MB or more on 16 chips of v5e (scaling book, sharding).
"""

NETWORK_SHARE = 0.94
"""Fraction of the bandwidth of a GPU node's network cards that a collective reaches.

46 to 48 of 50 GB/s on each card (NVIDIA, github.com/NVIDIA/nccl-tests/issues/290).
"""


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL (src/graph/tuning.cc).

    near_seconds, far_seconds: latency of a step inside a node and between nodes (`hwLat`, there in microseconds).
    share: fraction of the bandwidth for data; LL128 sends 120 bytes of data in each 128.
    """

    near_seconds: float
    far_seconds: float
    share: float


RINGS = (Protocol(1.9e-6, 4.0e-6, 120 / 128), Protocol(3.4e-6, 14.0e-6, 1.0))
TREE = Protocol(1.25e-6, 8.5e-6, 0.92 * 120 / 128)
"""NCCL assumes 0.92 of a ring's bandwidth for a tree (src/graph/tuning.cc). Only all-reduces have a tree algorithm."""


@dataclass(frozen=True)
class LinkFigures:
    """Constants of collectives inside a GPU node: seconds = start_seconds + seconds at full rate / share."""

    start_seconds: float
    share: float


@cache
def link_figures(name: str) -> LinkFigures:
    """Return the constants of a GPU's links inside a node; GPUs without measurements use those of `related_gpu`."""
    return LinkFigures(**gpu_products()["links"][related_gpu(name)])


def collective_efficiency(system: System, time: CollectiveTime) -> float:
    """Return the fraction of the links' full rate that a collective reaches, from 0 to 1.

    time: the collective's time at full rate. On GPUs the achieved time includes start-up; on TPUs `time` already has
    the latency of hops.
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
    """Yield (latency of all steps in seconds, fraction of full rate) for each algorithm that NCCL can use across nodes.

    A ring of n devices in m nodes takes n - 1 steps, m - 1 of them between nodes; an all-reduce takes twice as many. A
    tree goes up and down its levels. For a group in one node the only pair is (0, 1): the latency is part of
    `LinkFigures.start_seconds`.
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
