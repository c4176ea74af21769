"""A step as data: models and workloads, the ops of a model, the passes over them, and how a step is run."""
