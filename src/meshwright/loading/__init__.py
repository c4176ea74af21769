"""Where a model with its weights comes from: a Hugging Face directory, or a run and its checkpoints."""

from meshwright.loading.adapter import save_adapter
from meshwright.loading.library import Found, find_model, load

__all__ = ["Found", "find_model", "load", "save_adapter"]
