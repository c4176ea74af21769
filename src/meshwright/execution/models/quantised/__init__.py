"""Weights and matmuls in 8 bits, those of experts too."""
