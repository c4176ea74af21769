"""Exposed time of ring attention's sends, each of which overlaps with the attention of one ring step.

Ring attention (`execution/runtime/attention/ring.py`) on P devices takes P ring steps forward and P backward. Each step
but the last sends on the keys and values that it attends to. In backward, the gradients of keys and values that a step
computes are sent during the next step; those of the first step belong to the device's own keys and are not sent, so no
gradients are sent during the first two steps. The last send comes after the last step: it brings each device the
gradients of its own keys, and overlaps with the backward matmuls of the query projection.

The TPU compiler schedules the sends this way (libtpu 0.0.42.1, default effort). With two layers of 32 heads, embed 1024
and S = 32K, over sp=8 of v5e:2x4, only the last send is exposed: 0.28 ms of 27.5 ms of sends. Predicted: 0.82 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.description.hardware.system import System
from meshwright.description.step.ir import Communicate
from meshwright.description.step.passes.shard_delta import HALO
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.seconds import PassSeconds, attention_seconds
from meshwright.record import Collective, Phase


@dataclass(frozen=True)
class RingWork:
    """Compute of one layer and microbatch on one device, with which the sends of ring attention overlap.

    degree: devices in the ring. step_attention: seconds of attention in one ring step; with zigzag order all are equal.
    query_backward: seconds of the query projection's backward matmuls.
    """

    degree: int
    step_attention: PassSeconds
    query_backward: float

    def exposed_share(self, phase: Phase, keys: float, gradients: float) -> float:
        """Return the fraction of a phase's send time that is exposed.

        keys: seconds to send keys and values in one ring step. gradients: seconds to send their gradients in one ring
        step.
        """
        sends, work = self.degree - 1, getattr(self.step_attention, phase)
        alone = sends if phase != "backward" else min(2, sends)
        exposed = alone * max(0.0, keys - work)
        if phase == "backward":
            exposed += max(0, sends - 2) * max(0.0, keys + gradients - work)
            exposed += (sends > 1) * max(0.0, gradients - work) + max(0.0, gradients - self.query_backward)
        return exposed / (sends * (keys + gradients))


def is_round_ring(move: Collective | Communicate) -> bool:
    """Whether a collective is a send of ring attention, that is, of keys, values or their gradients."""
    name = move.name if isinstance(move, Communicate) else move.array
    return move.kind == "collective-permute" and move.axes == ("sp",) and name != HALO


def ring_work(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> RingWork:
    """Return the compute time of one layer with which the sends of ring attention overlap."""
    attention, query_backward = attention_seconds(workload, mesh, system, strategy)
    return RingWork(mesh.sp, attention * (1 / mesh.sp), query_backward)
