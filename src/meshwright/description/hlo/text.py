"""A compiled program as HLO text."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any

from meshwright.description.hlo.shapes import dtype_bits

if TYPE_CHECKING:
    import jax

_ELIDED = re.compile(r" = (\w+)\[([\d,]*)\]\S* constant\(\{\.\.\.\}\)")
_MOST_CONSTANT_BYTES = 1 << 20


def hlo_text(compiled: jax.stages.Compiled) -> str:
    """Return the program as HLO text, with small constants printed in full.

    `as_text` elides every constant of more than ten elements, and the tables that map devices to shards are such
    constants. JAX has no public name for the printer's options (0.10.2).
    """
    text = compiled.as_text() or ""
    elided_bytes = sum(
        dtype_bits(dtype) // 8 * math.prod(int(dim or 1) for dim in dims.split(","))
        for dtype, dims in _ELIDED.findall(text)
    )
    executable: Any = compiled.runtime_executable()
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
