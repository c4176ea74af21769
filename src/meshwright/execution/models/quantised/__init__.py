"""Weights in 8 and 4 bits, and matmuls in 8 bits, including experts'."""
