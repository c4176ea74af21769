"""Models with their weights: loaded onto a mesh, asked for logits and for text, and saved."""

from meshwright.inference.library import load

__all__ = ["load"]
