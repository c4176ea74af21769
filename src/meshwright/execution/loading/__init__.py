"""Load a model with its weights from a Hugging Face directory, or from a run and its checkpoints."""
