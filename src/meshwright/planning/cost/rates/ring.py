"""Exposed time of ring attention: the sends of each ring step overlap with the attention of that step.

As implemented in `execution/runtime/attention/ring.py`, with P ring steps forward and P backward: each step but the
last forwards the keys and values that it attends to. In backward, gradients follow the keys one step later; the first
two steps send none. The last send, which returns a device's own gradients, overlaps with the matmuls of the queries'
gradient.

The TPU compiler schedules the sends this way (libtpu 0.0.42.1, default effort): for two layers of 32 heads with embed
1024 and S = 32K, over sp=8 of v5e:2x4, only the last send is exposed, 0.28 of 27.5 ms; predicted are 0.82 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.description.hardware.system import System
from meshwright.description.step.ir import Communicate
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.seconds import PassSeconds, attention_seconds
from meshwright.record import Collective, Phase


@dataclass(frozen=True)
class RingWork:
    """Compute of one layer on one microbatch while arrays are sent round a ring of `degree` devices.

    turn: seconds of attention in one ring step; with zigzag order all steps are equal. after: seconds of the matmuls of
    the queries' gradient.
    """

    degree: int
    turn: PassSeconds
    after: float

    def exposed_share(self, phase: Phase, keys: float, gradients: float) -> float:
        """Return the exposed fraction of a phase's sends.

        keys, gradients: seconds to send them in one ring step; 0 if none are sent.
        """
        sends, work = self.degree - 1, getattr(self.turn, phase)
        alone = sends if phase != "backward" else min(2, sends)
        exposed = alone * max(0.0, keys - work)
        if phase == "backward":
            exposed += max(0, sends - 2) * max(0.0, keys + gradients - work)
            exposed += (sends > 1) * max(0.0, gradients - work) + max(0.0, gradients - self.after)
        return exposed / (sends * (keys + gradients))


def is_round_ring(move: Collective | Communicate) -> bool:
    """Whether a collective sends keys, values or their gradients round the ring of sp."""
    return move.kind == "collective-permute" and move.axes == ("sp",)


def ring_work(workload: Workload, mesh: MeshShape, system: System, strategy: Strategy) -> RingWork:
    """Return the compute of one layer that the sends of ring attention on a mesh can overlap with."""
    attention, after = attention_seconds(workload, mesh, system, strategy)
    return RingWork(mesh.sp, attention * (1 / mesh.sp), after)
