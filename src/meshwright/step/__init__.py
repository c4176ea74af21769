"""A step as data: the ops of a model, the passes over them, and how a step is run."""
