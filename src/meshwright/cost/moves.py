"""What collectives are counted in: the tokens of a device, and one move that runs so many times."""

from __future__ import annotations

from meshwright.mesh import MeshShape
from meshwright.record import Collective, Kind, Phase
from meshwright.workload import Workload, token_axes


def tokens_of(workload: Workload, mesh: MeshShape) -> int:
    """The tokens of one device."""
    return workload.tokens // mesh.degree(token_axes())


def times(count: int, kind: Kind, axes: tuple[str, ...], phase: Phase, size: float, array: str) -> Collective:
    """A collective of `size` bytes that runs `count` times."""
    return Collective(kind=kind, axes=axes, phase=phase, bytes=int(size) * count, count=count, array=array)
