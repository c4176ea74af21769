"""Forward passes over a model's ops and its declared parameters."""

from meshwright.models.decoder import loss_and_load
from meshwright.models.ends import embed, logits
from meshwright.models.pipelined import staged_loss_and_load
from meshwright.models.sampling import sample, sampling_layout

__all__ = [
    "embed",
    "logits",
    "loss_and_load",
    "sample",
    "sampling_layout",
    "staged_loss_and_load",
]
