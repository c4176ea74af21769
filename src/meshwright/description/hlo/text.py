"""Print a compiled program as HLO text.

Uses JAX internals, checked with jaxlib 0.10.2 and 0.12.0.1. All are reached from the result of the public
`Compiled.runtime_executable()`: its `hlo_modules()` and `get_parameter_shardings()`, and `HloPrintOptions` and
`HloSharding.from_proto` of the extension module that defines their results. If one is missing, the text is that of
`Compiled.as_text()`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.description.hlo.shapes import dtype_bits

if TYPE_CHECKING:
    import jax

_ELIDED = re.compile(r" = (\w+)\[([\d,]*)\]\S* constant\(\{\.\.\.\}\)")
_MOST_CONSTANT_BYTES = 1 << 20

_PARTITIONED = re.compile(r"\s*HloModule [^\n]* num_partitions=")
_ENTRY = re.compile(r"^ENTRY ", re.MULTILINE)
_PARAMETER = re.compile(r"^ *(?:ROOT )?%?[^\s=]+ = [^\n]*? parameter\((\d+)\)", re.MULTILINE)
_SHARDED = ", sharding="


def hlo_text(compiled: jax.stages.Compiled) -> str:
    """Return the program as HLO text, with small constants printed in full and the shardings of its arguments.

    `as_text` elides every constant of more than ten elements, such as the tables that map devices to shards. From
    jaxlib 0.12 it also leaves out the arguments' shardings (checked with 0.12.0.1).
    """
    executable: Any = compiled.runtime_executable()
    protos = getattr(executable, "get_parameter_shardings", tuple)() or ()  # May be absent or None.
    readers = [getattr(sys.modules[type(proto).__module__], "HloSharding", None) for proto in protos]
    shardings = tuple(str(reader.from_proto(proto)) for reader, proto in zip(readers, protos, strict=True) if reader)
    return with_argument_shardings(_with_constants(compiled.as_text() or "", executable), shardings)


def with_argument_shardings(text: str, shardings: Sequence[str]) -> str:
    """Return an HLO text with a `sharding` attribute added to each entry parameter that has none.

    Args:
        text: one module; returned unchanged if it is for a single device.
        shardings: the sharding of each argument in HLO's notation, '' if unknown. Unless there is one for each
            parameter, the text is returned unchanged.
    """
    entry = _ENTRY.search(text) if _PARTITIONED.match(text) else None
    if entry is None:
        return text
    head, rest = text[: entry.start()], text[entry.start() :]
    body, brace, tail = rest.partition("\n}")
    numbers = sorted(int(found[1]) for found in _PARAMETER.finditer(body))
    if numbers != list(range(len(shardings))):
        return text

    def attributed(parameter: re.Match[str]) -> str:
        sharding = shardings[int(parameter[1])]
        is_known = bool(sharding) and not body.startswith(_SHARDED, parameter.end())
        return f"{parameter[0]}{_SHARDED}{sharding}" if is_known else parameter[0]

    return head + _PARAMETER.sub(attributed, body) + brace + tail


def _with_constants(text: str, executable: Any) -> str:
    """Return the text with all constants in full, printed again if it elides some; unchanged if these are too large."""
    elided_bytes = sum(
        dtype_bits(dtype) // 8 * math.prod(int(dim or 1) for dim in dims.split(","))
        for dtype, dims in _ELIDED.findall(text)
    )
    if not elided_bytes or elided_bytes > _MOST_CONSTANT_BYTES or not hasattr(executable, "hlo_modules"):
        return text
    printed = []
    for module in executable.hlo_modules():
        options = getattr(sys.modules[type(module).__module__], "HloPrintOptions", None)
        if options is None:
            return text
        options = options()
        options.print_large_constants = True
        printed.append(module.to_string(options))
    return "\n\n".join(printed)
