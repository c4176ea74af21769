"""XLA's warnings about involuntary full rematerialization: values gathered whole on every device to be resharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import scope_of
from meshwright.description.hlo.shapes import Shape
from meshwright.description.hlo.specs import Spec, parse_hlo_sharding
from meshwright.proof.compiler.program import CompiledProgram

_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{.*?\})"
    r" to (?:sharding )?(\{.*?\}) (?:efficiently |without doing a full rematerialization of the tensor )?"
    r"for HLO operation:? %?([\w.\-]+) = (\w+)\[([\d,]*)\]"
)

# The partitioner tries ways to partition a gather or a scatter on a copy of the op, to estimate what they cost
# (`EvaluatePartitionCost`, xla/service/spmd/spmd_partitioner_util.h). It warns about these copies too, whose operands
# have this name, and then may choose another way (jaxlib 0.11.2 and 0.12.0.1).
_ONLY_ESTIMATED = "fake_parameter."

_OP_NAME = re.compile(r'op_name="((?:[^"\\]++|\\.)*+)"')


@dataclass(frozen=True, kw_only=True)
class FullRematerialization:
    """A value that XLA reshards by gathering it whole on every device.

    op: the named scopes and primitive that compute the value. source: the file:line of that op. array: the value's
    per-device shape before resharding. before, after: its shardings over mesh axes, or the compiler's text where mesh
    axes cannot express a sharding.
    """

    op: str
    source: str
    array: Shape
    before: Spec | str
    after: Spec | str


def read_full_rematerializations(
    program: CompiledProgram, mesh: Mapping[str, int]
) -> tuple[FullRematerialization, ...]:
    """Return the values that XLA reshards by gathering them whole, in the order of its warnings, without repetition.

    mesh: every axis and its degree, outermost first.
    """
    if not _WARNING.search(program.messages):
        return ()
    instructions = list(parse_hlo(program.propagated).instructions()) if program.propagated else []
    source_by_name = {one.name: one.source for one in instructions}
    source_by_op_name = {one.op_name: one.source for one in instructions if one.source}
    warnings = []
    for line in program.messages.splitlines():
        found = _WARNING.search(line)
        if found is None:
            continue
        before, after, name, dtype, dims = found.groups()
        if name.startswith(_ONLY_ESTIMATED):
            continue
        path = _OP_NAME.search(line)
        op_name = path[1] if path else ""
        array = Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        rank = len(array.dims)
        warnings.append(
            FullRematerialization(
                op=scope_of(op_name) or name,
                source=source_by_op_name.get(op_name) or source_by_name.get(name, ""),
                array=array,
                before=parse_hlo_sharding(before, rank, mesh) or before,
                after=parse_hlo_sharding(after, rank, mesh) or after,
            )
        )
    return tuple(dict.fromkeys(warnings))
