"""Collectives between slices, over the data center network (DCN).

Each slice runs its own program. The TPU compiler writes a collective between slices as a send to the runtime
(Megascale) and a receive of the result; an attribute of the send has the kind of collective (libtpu 0.0.42.1). A
collective over devices of several slices is split into one inside slices and one between slices.
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
    """Return the kind of the collective between slices that a send starts; None if it starts no collective."""
    pattern = _PATTERN.search(send.attributes.get("frontend_attributes", ""))
    return _KINDS.get(pattern[1], "collective-permute") if pattern else None


def dcn_collectives(module: Module, across: Mapping[str, int]) -> Iterator[Collective]:
    """Yield every collective between slices of a program; bytes are per device and step.

    across: for each mesh axis, the number of slices that it extends over. A collective is over all axes for which this
    exceeds 1.
    """
    axes = tuple(axis for axis, degree in across.items() if degree > 1)
    num_slices, runs = math.prod(across.values()), count_executions(module)
    for send in module.instructions():
        kind, times = dcn_kind(send), runs.times[send.computation]
        if send.opcode != "send" or kind is None or not times:
            continue
        array = next(send.shape.arrays())
        (description,) = describe(module, send)
        # An all-gather sends the shard of one slice; its bytes are those of the gathered result.
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
