"""Microbatch pass: the sizes of a step's symbolic dims when its batch is split into microbatches."""

from __future__ import annotations

from functools import lru_cache

from meshwright.description.step.blocks import program
from meshwright.description.step.ir import Block, Elementwise, Extents, Region
from meshwright.description.step.layer import Dispatch, DotProduct
from meshwright.description.step.model import Model
from meshwright.description.step.passes.muon import matrix_counts
from meshwright.description.step.passes.nodes import Weight
from meshwright.description.step.passes.shard_delta import chunk_sizes
from meshwright.description.step.rules import token_axes
from meshwright.description.step.sequence import num_parts
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.token_routing import routed_tokens, sent_tokens, stored_experts
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape


def extents_of(workload: Workload, mesh: MeshShape, strategy: Strategy) -> Extents:
    """Return the sizes of a step's symbolic dims, for one microbatch.

    Over all devices:

    - B: sequences. S: tokens of a sequence. Z, Y, W, U, X: see `passes.shard_delta`.
    - I: B times S, the rows of a contrastive batch.
    - loss: elements of the all-reduce of the loss.

    Per device, in a model with experts:

    - C: token copies that it sends to experts. CT: those of all devices of its tp group.
    - R: rows of one of its experts at even load.
    - A: (token, expert) pairs of its tokens.
    - sent, gathered: elements of the arrays of token counts that it sends over ep and gathers over tp.
    - M: number of its MoE layers.

    With Muon, also the sizes of `passes.muon.matrix_counts`.
    """
    parts = strategy.num_microbatches
    sizes: dict[str, float] = {"B": workload.sequences / parts, "S": workload.seq_len}
    sizes |= chunk_sizes(workload.seq_len, num_parts(mesh, strategy))
    if any(isinstance(op, DotProduct) for op in program(workload.model).logits):
        sizes["I"] = workload.tokens / parts
    # If each stage runs its own program, the last stage sums the losses of all microbatches before the all-reduce.
    sums = 1 if workload.z_loss == 0 else 2
    sizes["loss"] = sums if mesh.pp == 1 or strategy.profile.spmd_pipeline else sums / parts
    if workload.model.experts:
        experts = stored_experts(workload, mesh)
        copies, tokens = routed_tokens(workload, mesh), sent_tokens(workload, mesh)
        device_tokens = workload.tokens / mesh.degree(token_axes())
        sizes |= {
            "C": copies / parts,
            "CT": copies * mesh.tp / parts,
            "R": device_tokens * mesh.ep * copies / (tokens * experts.num_stored) / parts,
            "A": tokens * experts.num_active / parts,
            "sent": experts.num_stored + mesh.ep,
            "gathered": experts.num_stored * mesh.tp,
            "M": -(-num_moe_layers(workload.model) // mesh.pp),
        }
    if strategy.optimizer == "muon":
        sizes |= matrix_counts(workload.model, mesh, strategy)
    return Extents(sizes=sizes, mesh=mesh)


@lru_cache(maxsize=1 << 6)
def num_moe_layers(model: Model) -> int:
    """Return the number of layers with experts."""
    routed = (stack for stack in program(model).stacks if any(isinstance(op, Dispatch) for op in stack.ops))
    return sum(stack.num_layers for stack in routed)


@lru_cache(maxsize=1 << 12)
def gradient_sum(work: Weight, region: Region, block: Block) -> Elementwise:
    """Return the op that adds a microbatch's weight gradient to the accumulated gradient."""
    return Elementwise(kind="accumulate", phase="backward", region=region, block=block, arrays=(work.used,))
