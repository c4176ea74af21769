"""Checks that a strategy's precision can run, not only be planned."""

from __future__ import annotations

from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape


def check_precision(mesh: MeshShape, strategy: Strategy) -> None:
    """Raise an error if a strategy's precision can be planned but not run."""
    if strategy.optimizer == "adamw-8bit":
        raise MeshwrightError("optimizer adamw-8bit can be planned but not run; use adamw with bf16 moments")
    if strategy.matmul_dtype and mesh.tp > 1 and strategy.collective_matmul:
        raise MeshwrightError(
            f"matmuls in {strategy.matmul_dtype} can be planned, but cannot run as matmuls"
            f" overlapped over tp={mesh.tp}; use collective_matmul=False"
        )
