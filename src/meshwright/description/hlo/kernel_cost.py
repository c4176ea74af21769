"""The cost of a hand-written kernel, encoded in the named scope of its call: HLO has no cost of a Triton kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright.description.hlo.module import Instruction

_SCOPE = re.compile(r"\bflops(\d{1,18})_bytes(\d{1,18})/")


class KernelCost(NamedTuple):
    """Flops of one call of a kernel, without padding, and the bytes that it reads from and writes to main memory."""

    flops: int
    num_bytes: int

    @property
    def scope(self) -> str:
        """The named scope to call the kernel in; `cost_of` reads the cost back from it."""
        return f"flops{self.flops}_bytes{self.num_bytes}"


def cost_of(instruction: Instruction) -> KernelCost | None:
    """Return the cost in the named scope of a kernel's call; None if there is none."""
    found = _SCOPE.search(instruction.op_name) if instruction.opcode == "custom-call" else None
    return KernelCost(int(found[1]), int(found[2])) if found else None
