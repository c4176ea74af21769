"""The cost of a kernel, in the named scope of its call: XLA:GPU's text of a Triton kernel does not tell it."""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright.description.hlo.module import Instruction

_SCOPE = re.compile(r"\bflops(\d{1,18})_bytes(\d{1,18})/")


class KernelCost(NamedTuple):
    """Flops of one call, without padding, and the bytes that it reads from and writes to main memory."""

    flops: int
    num_bytes: int

    @property
    def scope(self) -> str:
        """The named scope in which the kernel is called."""
        return f"flops{self.flops}_bytes{self.num_bytes}"


def cost_of(instruction: Instruction) -> KernelCost | None:
    """Return the cost that a call's named scope tells, if it does."""
    found = _SCOPE.search(instruction.op_name) if instruction.opcode == "custom-call" else None
    return KernelCost(int(found[1]), int(found[2])) if found else None
