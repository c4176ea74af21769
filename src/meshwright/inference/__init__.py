"""Models with their weights: loaded onto a mesh, asked for logits and for text, and saved."""

from meshwright.inference.library import load
from meshwright.inference.loaded import Generated, LoadedModel, Prompt

__all__ = ["Generated", "LoadedModel", "Prompt", "load"]
