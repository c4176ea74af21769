"""Forward passes over the declared parameters."""

from meshwright.models.decoder import Cache, block, embed, logits, loss
from meshwright.models.sampling import sample, sampling_layout

__all__ = ["Cache", "block", "embed", "logits", "loss", "sample", "sampling_layout"]
