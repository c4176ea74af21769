"""Attention: kernels for whole sequences, and for those that sp splits."""
