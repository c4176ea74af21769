"""A proxy with one port in front of several servers of the same model."""
