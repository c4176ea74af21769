"""Which precisions and which dropout of a strategy run, and where."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.workload.config import ModelConfig
from meshwright.workload.strategy import Strategy


def check_precision(model: ModelConfig, mesh: MeshShape, strategy: Strategy) -> None:
    """Raise where a precision or a dropout that a strategy says can be planned, and does not run."""
    if strategy.optimizer == "adamw-8bit":
        raise MeshwrightError("optimizer adamw-8bit can be planned, but is none that runs; adamw with bf16 moments is")
    if strategy.dropout and mesh.pp > 1:
        raise MeshwrightError(
            f"dropout={strategy.dropout} on the stages of mesh {mesh} can be planned, but what runs has it with pp=1"
        )
    if strategy.matmul_dtype is None:
        return
    hindrances = (
        model.experts is not None and f"the experts of {model.name}; leave matmul_dtype out",
        mesh.pp > 1 and f"the stages of mesh {mesh}; use pp=1",
        mesh.tp > 1 and strategy.overlaps_tp and f"products overlapped over tp={mesh.tp}; use overlaps_tp=False",
    )
    for hindrance in filter(None, hindrances):
        raise MeshwrightError(
            f"products in {strategy.matmul_dtype} can be planned, but what runs does not have them in {hindrance}"
        )
