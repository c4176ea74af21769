"""Forward passes over a model's ops and its declared parameters."""

from meshwright.models.context import Cache, LayerContext, PositionInfo
from meshwright.models.decoder import loss_and_load
from meshwright.models.ends import embed, logits
from meshwright.models.layer import LayerResult, run_layer
from meshwright.models.pipelined import staged_loss_and_load
from meshwright.models.sampling import sample, sampling_layout

__all__ = [
    "Cache",
    "LayerContext",
    "LayerResult",
    "PositionInfo",
    "embed",
    "logits",
    "loss_and_load",
    "run_layer",
    "sample",
    "sampling_layout",
    "staged_loss_and_load",
]
