"""Time of each implementation of a sharded matmul on a system, and its bound: compute, memory or communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import MeshPlacement, lay_mesh
from meshwright.description.hardware.system import System
from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.inference import Inference
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.steps import Communicate, Implementation
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.collective import CollectiveTime, collective_seconds
from meshwright.planning.cost.roofline import hardware_intensity, intensity, op_seconds
from meshwright.planning.cost.threshold import Threshold, flops_per_byte, inequality, say_threshold
from meshwright.record import Bound, Collective


@dataclass(frozen=True)
class Intensity:
    """Arithmetic intensity of an implementation, relative to its memory traffic or to one collective.

    Attributes:
        value: flops of the implementation per byte of memory traffic or of the collective.
        dims: `value` as an expression of dims; empty if the flops are of several matmuls.
        hardware: peak flops of the chip in the time of one byte of memory traffic, or of one byte of the collective
            over links used in both directions, as in large rings. If `value` is lower, compute is not the bound.
        here: like `hardware`, for the actual links (open lines, few chips, latency).
    """

    value: float
    dims: str
    hardware: float
    here: float


@dataclass(frozen=True, kw_only=True)
class PricedImplementation:
    """An implementation of a sharded matmul with its times on one device at full rate, which are lower bounds.

    Attributes:
        collectives: its collectives, with their seconds.
        communication_seconds: sum over the collectives.
        memory: intensity relative to memory traffic; None without a matmul.
        network: intensity relative to the longest collective; None without a matmul or a collective.
        threshold: condition for being compute bound, relative to memory traffic or collectives, whichever take longer;
            None without a matmul.
    """

    implementation: Implementation
    collectives: tuple[Collective, ...]
    flops_seconds: float
    memory_seconds: float
    communication_seconds: float
    memory: Intensity | None
    network: Intensity | None
    threshold: Threshold | None

    @property
    def seconds(self) -> float:
        """The time if collectives overlap with matmuls: the longest of compute, memory traffic and communication."""
        return max(self.flops_seconds, self.memory_seconds, self.communication_seconds)

    @property
    def serial_seconds(self) -> float:
        """The time without overlap: that of the matmuls plus that of the collectives."""
        return max(self.flops_seconds, self.memory_seconds) + self.communication_seconds

    @property
    def bound(self) -> Bound | None:
        """The resource that takes longest; None if nothing takes time."""
        times: dict[Bound, float] = {
            "compute": self.flops_seconds,
            "memory": self.memory_seconds,
            "communication": self.communication_seconds,
        }
        return max(times, key=lambda bound: times[bound]) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class PricedProduct:
    """A matmul or resharding with the times of its implementations on a system.

    inference: the result and the implementations without times. implementations: fastest first. chosen: the
    implementation that the expression prescribes, else the fastest.
    """

    inference: Inference
    layout: MeshPlacement
    implementations: tuple[PricedImplementation, ...]
    chosen: PricedImplementation

    @property
    def alternatives(self) -> tuple[PricedImplementation, ...]:
        """The implementations that are not chosen, fastest first."""
        return tuple(way for way in self.implementations if way is not self.chosen)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, in the schema of `meshwright matmul --json`."""
        inference, chosen = self.inference, self.chosen
        return {
            "case": inference.case,
            "cases": [asdict(found) for found in inference.cases],
            "result": str(inference.result),
            "collectives": _collectives_json(chosen),
            "local_shapes": {
                str(array): list(inference.sizes.local_shape(array))
                for array in (*inference.operands, inference.result)
            },
            "flops_per_device": chosen.implementation.flops,
            "intensity": {"memory": _intensity_json(chosen.memory), "network": _intensity_json(chosen.network)},
            "bound": chosen.bound,
            "threshold": say_threshold(chosen.threshold) if chosen.threshold else "",
            "alternatives": [
                {
                    "steps": [str(step) for step in priced.implementation.steps],
                    "collectives": _collectives_json(priced),
                    "flops_per_device": priced.implementation.flops,
                    "seconds": priced.seconds,
                    "bound": priced.bound,
                }
                for priced in self.alternatives
            ],
        }


def price(inference: Inference, system: System, *, dtype: str = "bf16") -> PricedProduct:
    """Return the times of each implementation of a sharded matmul, with its mesh laid over the system.

    Implementations are sorted by their time with overlap, then by their time without. Raises an error if the mesh does
    not fit the system, or if the dtype's size is not the element size of `inference`.
    """
    if dtype_bytes(dtype) != inference.sizes.element_bytes:
        raise MeshwrightError(
            f"the implementations were inferred for elements of {inference.sizes.element_bytes:g} bytes;"
            f" {dtype} has {dtype_bytes(dtype):g}"
        )
    layout = lay_mesh(system, inference.sizes.degrees)
    priced = {way: _priced(way, inference.sizes, layout, dtype) for way in inference.implementations}
    ways = sorted(priced.values(), key=lambda way: (way.seconds, way.serial_seconds))
    chosen = priced[inference.prescribed] if inference.prescribed else ways[0]
    return PricedProduct(inference=inference, layout=layout, implementations=tuple(ways), chosen=chosen)


@dataclass(frozen=True)
class _TimedCollective:
    """A collective, its time, and the chip's flops in the time of one of its bytes (`Intensity.hardware`, `here`)."""

    step: Communicate
    time: CollectiveTime
    hardware: float
    here: float


def _timed(step: Communicate, layout: MeshPlacement, peak: float) -> _TimedCollective:
    """Return the timed collective of a step of an implementation; peak: flops per second of the chip."""
    placement = layout.placement(step.axes)
    time = collective_seconds(step.kind, step.bytes, placement)
    closed = replace(placement, rings=tuple(replace(ring, is_wrapped=True) for ring in placement.rings))
    ideal = collective_seconds(step.kind, step.bytes, closed).asymptotic_seconds
    return _TimedCollective(step, time, peak * ideal / step.bytes, peak * time.seconds / step.bytes)


def _priced(way: Implementation, sizes: Sizes, layout: MeshPlacement, dtype: str) -> PricedImplementation:
    """Return an implementation with its times."""
    system = layout.system
    moves = [_timed(step, layout, system.peak(dtype)) for step in way.communications]
    touched = [array for product in way.products for array in (*product.operands, product.result)]
    memory_bytes = sum(sizes.local_bytes(array) for array in touched)
    op = op_seconds(way.flops, memory_bytes, system, dtype=dtype)
    communication = math.fsum(move.time.seconds for move in moves)
    chip = hardware_intensity(system, dtype=dtype)
    return PricedImplementation(
        implementation=way,
        collectives=tuple(
            replace(c, seconds=move.time.seconds) for c, move in zip(way.collectives, moves, strict=True)
        ),
        flops_seconds=op.flops_seconds,
        memory_seconds=op.memory_seconds,
        communication_seconds=communication,
        memory=Intensity(intensity(way.flops, memory_bytes), "", chip, chip) if way.products else None,
        network=_network(way, moves, sizes) if way.products and moves else None,
        threshold=_threshold(
            way,
            moves,
            [(array, chip) for array in touched],
            sizes,
            is_memory=op.memory_seconds > max(op.flops_seconds, communication),
        ),
    )


def _network(way: Implementation, moves: list[_TimedCollective], sizes: Sizes) -> Intensity:
    """Return the intensity of an implementation relative to its longest collective."""
    longest = max(moves, key=lambda move: move.time.seconds)
    dims = str(flops_per_byte(way.products[0], longest.step.counted, sizes)) if len(way.products) == 1 else ""
    return Intensity(intensity(way.flops, longest.step.bytes), dims, longest.hardware, longest.here)


def _threshold(
    way: Implementation,
    moves: list[_TimedCollective],
    arrays: Sequence[tuple[ShardedArray, float]],
    sizes: Sizes,
    *,
    is_memory: bool,
) -> Threshold | None:
    """Return the condition under which an implementation is compute bound; None without a matmul.

    arrays: (array that the implementation reads or writes, the chip's flops per byte of memory traffic). is_memory:
    whether compute is compared with memory traffic, not with the collectives (`moves`).
    """
    if not way.products:
        return None
    if is_memory or not moves:
        return Threshold("memory", inequality(way.products, arrays, sizes))
    condition = inequality(way.products, [(move.step.counted, move.hardware) for move in moves], sizes)
    if all(math.isclose(move.here, move.hardware, rel_tol=0.01) for move in moves):
        return Threshold("network", condition)
    here = inequality(way.products, [(move.step.counted, move.here) for move in moves], sizes)
    return Threshold("network", condition, here, tuple(dict.fromkeys(move.time.binds for move in moves)))


def _collectives_json(priced: PricedImplementation) -> list[dict[str, Any]]:
    """Return the collectives of an implementation as plain data."""
    return [
        {"kind": c.kind, "axes": list(c.axes), "array": c.array, "bytes": c.bytes, "seconds": c.seconds}
        for c in priced.collectives
    ]


def _intensity_json(found: Intensity | None) -> dict[str, Any] | None:
    """Return an intensity as plain data."""
    return asdict(found) if found else None
