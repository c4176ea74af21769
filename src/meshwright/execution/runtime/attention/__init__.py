"""Attention: kernels for whole sequences, and for sequences split over sp."""
