"""Numbers of token copies sent to experts. A token has one copy, a row, for each of its active experts."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.description.step.model import Experts
from meshwright.description.step.rules import token_axes
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape


def sent_tokens(workload: Workload, mesh: MeshShape) -> int:
    """Return the number of tokens in a step that a device sends to experts.

    With ep, these are the device's own tokens of the residual stream. Without ep, they are the tokens of its tp group,
    which are gathered over tp first.
    """
    return workload.tokens // mesh.degree(token_axes()) // (mesh.tp if mesh.ep > 1 else 1)


def routed_tokens(workload: Workload, mesh: MeshShape) -> int:
    """Return how many token copies a device sends to experts in a step: with a capacity factor, the number of slots."""
    experts, tokens = stored_experts(workload, mesh), sent_tokens(workload, mesh)
    if experts.capacity_factor is None:
        return tokens * experts.num_active
    return experts.num_stored * experts.slots(tokens)


def dropless_padding(workload: Workload, mesh: MeshShape) -> float:
    """Return the rows that a device allocates so that any routing fits, divided by its rows at even load.

    The ratio is 1 with a capacity factor, which limits the rows, and without ep, because a device then processes only
    the copies that it sends itself.
    """
    experts = stored_experts(workload, mesh)
    if experts.capacity_factor is not None or mesh.ep == 1:
        return 1.0
    tokens = sent_tokens(workload, mesh)
    return mesh.ep * experts.max_copies(tokens, mesh.ep) / routed_tokens(workload, mesh)


def expert_rows(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> float:
    """Return the rows that a device allocates for experts in a microbatch: the token copies of its whole tp group."""
    copies = routed_tokens(workload, mesh) * (mesh.tp if mesh.ep > 1 else 1)
    return copies * dropless_padding(workload, mesh) / strategy.num_microbatches


BLOCK_ROWS = 16, 2048
"""Smallest and largest number of rows of a block.

16 is a tile of GPUs' matrix units. With 2048 rows, a 16-bit matmul takes longer than the accumulation of its weight
gradient on any chip.
"""

BLOCKS_AN_EXPERT = 4
"""The smallest number of blocks per expert at even load. More reduce padding: on average the last is half empty."""


class Blocks(NamedTuple):
    """The rows that a device allocates for its experts, cut into `num_blocks` blocks of `size` rows."""

    rows: int
    num_blocks: int
    size: int

    @property
    def padding(self) -> float:
        """Rows of all blocks divided by allocated rows."""
        return self.num_blocks * self.size / self.rows


def expert_blocks(num_rows: int, num_experts: int) -> tuple[int, int]:
    """Return (number of blocks, rows per block) that suffice for any routing of `num_rows` rows to the experts.

    A block has rows of one expert only. In the worst case, each expert has one row more than fills whole blocks.
    """
    least, most = BLOCK_ROWS
    in_balance = max(1, num_rows // num_experts // BLOCKS_AN_EXPERT)
    size = min(num_rows, most, max(least, 1 << (in_balance.bit_length() - 1)))
    return min(num_rows, num_experts + max(0, num_rows - num_experts) // size), size


def device_blocks(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT) -> Blocks:
    """Return the blocks of a device's experts for a microbatch, in a model without a capacity factor."""
    rows = round(expert_rows(workload, mesh, strategy))
    return Blocks(rows, *expert_blocks(rows, stored_experts(workload, mesh).num_stored // mesh.ep))


def stored_experts(workload: Workload, mesh: MeshShape) -> Experts:
    """Return the experts of a workload's model, which must have some, padded as the mesh stores them."""
    experts = workload.model.experts
    assert experts is not None, workload.model.name
    return experts.padded(mesh.ep)
