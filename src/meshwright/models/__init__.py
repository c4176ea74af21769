"""Forward passes over a model's ops and its declared parameters."""

from meshwright.models.adapters import merge_adapters
from meshwright.models.decoder import loss_and_load
from meshwright.models.ends import embed, logits
from meshwright.models.forward import all_logits, all_losses
from meshwright.models.generation import generate_tokens
from meshwright.models.pipelined import staged_loss_and_load
from meshwright.models.sampling import GREEDY, Sampling

__all__ = [
    "GREEDY",
    "Sampling",
    "all_logits",
    "all_losses",
    "embed",
    "generate_tokens",
    "logits",
    "loss_and_load",
    "merge_adapters",
    "staged_loss_and_load",
]
