"""A model with its weights on a mesh: logits, generated text, scores, and saving."""
