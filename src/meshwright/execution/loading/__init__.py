"""Where a model with its weights comes from: a Hugging Face directory, or a run and its checkpoints."""
