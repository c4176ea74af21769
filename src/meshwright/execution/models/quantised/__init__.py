"""Weights and matmuls in 8 bits, including experts'."""
