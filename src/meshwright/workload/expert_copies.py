"""How many copies of tokens go to experts, one for each that works on a token."""

from __future__ import annotations

from meshwright.mesh import MeshShape
from meshwright.workload.config import Experts
from meshwright.workload.rules import token_axes
from meshwright.workload.workload import Workload


def sent_tokens(workload: Workload, mesh: MeshShape) -> int:
    """The tokens that one device sends to experts: its share of the stream, or where ep is 1 that of all of its tp.

    Where experts are split each device of tp exchanges its own tokens; else they are gathered over tp first.
    """
    return workload.tokens // mesh.degree(token_axes()) // (mesh.tp if mesh.ep > 1 else 1)


def sent_copies(workload: Workload, mesh: MeshShape) -> int:
    """The copies that one device sends to experts: of every token, or as many as there are slots for."""
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
    return mesh.ep * experts.room(tokens, mesh.ep) / sent_copies(workload, mesh)


def _experts(workload: Workload) -> Experts:
    """The experts of a workload's model, which has some."""
    experts = workload.model.experts
    assert experts is not None, workload.model.name
    return experts
