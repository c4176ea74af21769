"""Passes over the ops of a step, one file each: from the ops of a model on logical dims to what devices run."""
