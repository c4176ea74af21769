"""Forward passes over the declared parameters."""

from meshwright.models.decoder import Cache, block, embed, logits, loss

__all__ = ["Cache", "block", "embed", "logits", "loss"]
