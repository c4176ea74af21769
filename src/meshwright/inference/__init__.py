"""Models with their weights: loaded onto a mesh, asked for logits and for text, and saved."""

from meshwright.inference.library import Found, find_model, load
from meshwright.inference.loaded import LoadedModel, Prompt
from meshwright.inference.save import check_target
from meshwright.inference.stream import GenerateOptions, Piece, collect

__all__ = [
    "Found",
    "GenerateOptions",
    "LoadedModel",
    "Piece",
    "Prompt",
    "check_target",
    "collect",
    "find_model",
    "load",
]
