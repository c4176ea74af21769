"""The cost of a hand-written kernel, encoded in the named scope of its call: HLO has no cost of a Triton kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright.description.hlo.module import Instruction

_SCOPE = re.compile(r"\bflops(\d{1,18})_bytes(\d{1,18})(?:_weights(\d{1,18}))?(?:_cached(\d{1,18}))?/")


class KernelCost(NamedTuple):
    """The cost of one call of a kernel.

    flops: without padding. num_bytes: read from and written to main memory. weights: values of weights that the kernel
    reads. cached: elements of a KV cache that it reads, and those with which it pads heads.
    """

    flops: int
    num_bytes: int
    weights: int = 0
    cached: int = 0

    @property
    def scope(self) -> str:
        """The named scope to call the kernel in; `cost_of` reads the cost back from it."""
        read = {"weights": self.weights, "cached": self.cached}
        parts = (f"_{name}{count}" for name, count in read.items() if count)
        return f"flops{self.flops}_bytes{self.num_bytes}{''.join(parts)}"


def cost_of(instruction: Instruction) -> KernelCost | None:
    """Return the cost in the named scope of a kernel's call; None if there is none."""
    found = _SCOPE.search(instruction.op_name) if instruction.opcode == "custom-call" else None
    return KernelCost(*(int(count or 0) for count in found.groups())) if found else None
