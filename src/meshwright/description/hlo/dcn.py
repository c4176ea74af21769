"""Collectives between slices, over the data center network (DCN).

Each slice runs its own program. The TPU compiler writes a collective between slices as a send to the runtime
(Megascale) and a receive of the result, with the pattern in an attribute (libtpu 0.0.42.1). A collective over axes
inside and between slices is split into one of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from meshwright.description.hlo.loops import count_executions
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.phases import describe
from meshwright.record import Collective, Kind

_PATTERN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS: Mapping[str, Kind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}


def dcn_kind(send: Instruction) -> Kind | None:
    """Return the kind of collective that a send starts between slices; None for another transfer."""
    pattern = _PATTERN.search(send.attributes.get("frontend_attributes", ""))
    return _KINDS.get(pattern[1], "collective-permute") if pattern else None


def dcn_collectives(module: Module, across: Mapping[str, int]) -> Iterator[Collective]:
    """Yield every collective between slices, in bytes per device and step.

    across: the part of each axis's degree between slices; a collective spans all axes for which this exceeds 1.
    """
    axes = tuple(axis for axis, degree in across.items() if degree > 1)
    num_slices, runs = math.prod(across.values()), count_executions(module)
    for send in module.instructions():
        kind, times = dcn_kind(send), runs.times[send.computation]
        if send.opcode != "send" or kind is None or not times:
            continue
        array = next(send.shape.arrays())
        (description,) = describe(module, send)
        # An all-gather sends one slice's part.
        whole = num_slices if kind == "all-gather" else 1
        yield Collective(
            kind=kind,
            axes=axes,
            phase=description.phase,
            bytes=array.bytes * whole * times,
            count=times,
            array=str(array),
            source=description.place,
            note="between slices",
        )
