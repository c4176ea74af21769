"""The frozen reference model of DPO: the forward pass that it adds to each step (`Workload.reference` is `live`)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.description.step.legality import (
    check_mesh,
    check_runnable,
    check_strategy,
    has_reference,
    unused_options,
)
from meshwright.description.step.model import without_lora
from meshwright.description.step.rules import RULES, stream_rules
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

KEPT = (
    "num_microbatches",
    "attention",
    "sp_method",
    "tp_stream",
    "collective_matmul",
    "matmul_dtype",
    "profile",
)
"""Fields of the policy's strategy that apply to the reference's forward pass too."""


class ReferencePass(NamedTuple):
    """The forward pass of a frozen reference, as the workload, mesh and strategy of a train step.

    Only the forward ops of that step run. Weights are stored in the compute dtype and sharded over the mesh (as in
    ZeRO-3), vectors are stored in the policy's dtype. The reference of a policy with adapters is the model without them
    (`shares_base`).
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy


@lru_cache(maxsize=1 << 12)
def reference_pass(workload: Workload, mesh: MeshShape, strategy: Strategy) -> ReferencePass | None:
    """Return the reference's forward pass in a step; None if there is no reference or its results are precomputed.

    The reference reads the same pairs as the policy. Its number of microbatches is the largest that divides both the
    policy's number of microbatches and the number of pairs on a device.
    """
    if not has_reference(workload):
        return None
    own = strategy.reference_mesh or mesh
    kept = replace(DEFAULT, **{name: getattr(strategy, name) for name in KEPT})
    each = max(1, workload.batch // own.degree(RULES["batch"]))
    kept = replace(kept, num_microbatches=math.gcd(each, strategy.num_microbatches))
    # The reference saves nothing for backward, and only the policy has adapters.
    read = replace(workload, model=without_lora(workload.model), frozen=(), remat="none", quantize_base=None)
    if shares_base(workload, mesh, strategy) and not strategy.zero_stage:
        kept = replace(kept, zero_stage=0)  # It reads the policy's arrays, which are whole at stage 0.
    idle = unused_options(read, own, kept)
    return ReferencePass(read, own, replace(kept, **{name: getattr(DEFAULT, name) for name in idle}))


def shares_base(workload: Workload, mesh: MeshShape, strategy: Strategy) -> bool:
    """Whether the reference reads the policy's own frozen parameters, without the adapters.

    These are the initial weights, in the dtypes that the reference uses (`Workload.stored_dtype`). A reference on
    another mesh needs a copy.
    """
    has_adapters = without_lora(workload.model) != workload.model
    return has_reference(workload) and has_adapters and strategy.reference_mesh in (None, mesh)


def check_reference(workload: Workload, mesh: MeshShape, strategy: Strategy, *, runs: bool = False) -> None:
    """Raise if a step's frozen reference cannot be split over its mesh. runs: also raise if it can only be planned."""
    own = strategy.reference_mesh
    if own is not None and own.num_devices != mesh.num_devices:
        raise MeshwrightError(
            f"reference_mesh {own} has {own.num_devices} devices; the reference shares the policy's, {mesh} of"
            f" {mesh.num_devices}"
        )
    if (base := workload.quantize_base) is not None and not shares_base(workload, mesh, strategy) and own is not None:
        raise MeshwrightError(
            f"reference_mesh is {own}; the reference reads the policy's weights in {base} where they are: leave it out"
        )
    if (found := reference_pass(workload, mesh, strategy)) is None:
        return
    if base is not None and strategy.zero_stage in (1, 2):
        raise MeshwrightError(
            f"zero_stage={strategy.zero_stage} has the weights in {base} whole on each device, and a reference reads"
            " them in shards; use zero_stage=3"
        )
    try:
        check_mesh(found.workload, found.mesh, stream_rules(found.strategy.tp_stream))
        check_strategy(found.workload, found.mesh, found.strategy)
        if runs:
            check_runnable(found.workload.model, found.mesh, found.strategy)
    except MeshwrightError as error:
        raise MeshwrightError(f"the reference: {error}") from None
