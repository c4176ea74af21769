"""Memory of a train step's arguments on one device: training state, batch, and those of a reference model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.reference import reference_pass, shares_base
from meshwright.description.step.rules import RULES, rules_of, token_axes
from meshwright.description.step.sequence import has_attention, is_zigzag
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.model_states import States, stored_elements

Kind = Literal["tpu", "gpu", "cpu"]
"""A kind of chip."""


def argument_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy = DEFAULT, *, kind: Kind = "cpu") -> int:
    """Return the bytes of a step's arguments on one device: parameters, optimizer state and batch.

    Included are dropout's random key, the gradient norm from which on a step is skipped, and the arguments of a frozen
    reference model (`reference_bytes`).
    """
    states = States(workload, mesh, strategy, is_tiled=kind == "tpu")
    scalars = 8 * (max(strategy.dropout, workload.lora_dropout) > 0) + 4 * (strategy.on_bad_step == "skip")
    own = int(states.arguments) + batch_bytes(workload, mesh, strategy) + scalars
    return own + int(reference_bytes(workload, mesh, strategy, kind=kind))


def reference_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy, *, kind: Kind = "cpu") -> float:
    """Return the bytes on one device that a reference model adds to a step's arguments; 0 if a step has none.

    They are its copy of the batch and, unless it uses the trained model's base weights (`step.reference.shares_base`),
    its parameters.
    """
    if (own := reference_pass(workload, mesh, strategy)) is None:
        return 0.0
    total = float(_text_bytes(own.workload, own.mesh, own.strategy))
    if shares_base(workload, mesh, strategy):
        return total
    model, mesh = padded(own.workload.model, own.mesh, rules_of(own.strategy)), replace(own.mesh, dp=1)
    paths = {path: parameter.role == "vector" for path, parameter in leaves(parameters(model))}
    for of_vectors, dtype in ((False, workload.compute_dtype), (True, workload.param_dtype)):
        others = frozenset(path for path, is_vector in paths.items() if is_vector is not of_vectors)
        total += dtype_bytes(dtype) * sum(stored_elements(model, mesh, is_tiled=kind == "tpu", without=others))
    return total


def batch_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy) -> int:
    """Return the bytes of a step's batch on one device: its text and, for DPO, the reference's log-probabilities."""
    rows = workload.sequences // mesh.degree(RULES["batch"])
    return _text_bytes(workload, mesh, strategy) + (4 * rows if workload.objective == "dpo" else 0)


def _text_bytes(workload: Workload, mesh: MeshShape, strategy: Strategy) -> int:
    """Return the bytes of a batch's text on one device: arrays of four bytes per token.

    The arrays are tokens and targets, and positions if tokens are reordered. Packed rows add positions, segments and
    loss weights, of which a model without attention reads only the weights. DPO adds an array of loss weights.
    """
    reads_positions = has_attention(workload.model)
    arrays = 2 + (workload.packed or is_zigzag(mesh, strategy)) * reads_positions
    if workload.packed:
        arrays += 1 + reads_positions
    arrays += workload.objective == "dpo"
    return arrays * 4 * (workload.tokens // mesh.degree(token_axes()))
