"""How many copies of tokens go to experts, one for each that works on a token."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.description.step.model import Experts
from meshwright.description.step.rules import token_axes
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape


def sent_tokens(workload: Workload, mesh: MeshShape) -> int:
    """Return the tokens that a device sends to experts.

    With ep these are its own part of the residual stream; without, the tokens of its tp group, gathered over tp first.
    """
    return workload.tokens // mesh.degree(token_axes()) // (mesh.tp if mesh.ep > 1 else 1)


def routed_tokens(workload: Workload, mesh: MeshShape) -> int:
    """Return the copies of tokens that one device sends to experts: all, or as many as there are slots for."""
    experts, tokens = _experts(workload), sent_tokens(workload, mesh)
    if experts.capacity_factor is None:
        return tokens * experts.num_active
    return experts.count * experts.slots(tokens)


def dropless_padding(workload: Workload, mesh: MeshShape) -> float:
    """The rows that a device has room for, to get any routing right, over those that come in balance; from 1.

    With a capacity slots are all there is room for, and where ep is 1 a device works on its own copies alone.
    """
    experts = _experts(workload)
    if experts.capacity_factor is not None or mesh.ep == 1:
        return 1.0
    tokens = sent_tokens(workload, mesh)
    return mesh.ep * experts.room(tokens, mesh.ep) / routed_tokens(workload, mesh)


def expert_rows(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> float:
    """The rows of a microbatch that the experts of a device have room for: copies of tokens, of all devices of tp."""
    copies = routed_tokens(workload, mesh) * (mesh.tp if mesh.ep > 1 else 1)
    return copies * dropless_padding(workload, mesh) / strategy.num_microbatches


BLOCK_ROWS = 16, 2048
"""Fewest and most rows of a block: a tile of GPUs' matrix units, and enough for a 16-bit matmul to take longer than the
accumulation of its weight gradient, on any chip."""

BLOCKS_AN_EXPERT = 4
"""Blocks for an expert's rows at even load, or more: on average the last is half empty."""


class Blocks(NamedTuple):
    """The rows that the experts of a device have room for, the blocks that they are cut into, and the rows of one."""

    rows: int
    num_blocks: int
    size: int

    @property
    def padding(self) -> float:
        """The rows of all blocks, over those that there is room for."""
        return self.num_blocks * self.size / self.rows


def expert_blocks(num_rows: int, num_experts: int) -> tuple[int, int]:
    """Return the most blocks, each of one expert's rows, that any routing of rows needs, and the rows of a block.

    Most are needed if each expert has one row more than fills its blocks.
    """
    least, most = BLOCK_ROWS
    in_balance = max(1, num_rows // num_experts // BLOCKS_AN_EXPERT)
    size = min(num_rows, most, max(least, 1 << (in_balance.bit_length() - 1)))
    return min(num_rows, num_experts + max(0, num_rows - num_experts) // size), size


def device_blocks(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> Blocks:
    """The blocks of a device for a microbatch, without a capacity."""
    rows = round(expert_rows(workload, mesh, strategy))
    return Blocks(rows, *expert_blocks(rows, _experts(workload).count // mesh.ep))


def _experts(workload: Workload) -> Experts:
    """The experts of a workload's model, which has some."""
    experts = workload.model.experts
    assert experts is not None, workload.model.name
    return experts
