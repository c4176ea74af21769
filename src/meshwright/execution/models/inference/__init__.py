"""A model with its weights on a mesh: asked for logits and for text, scored, saved."""
