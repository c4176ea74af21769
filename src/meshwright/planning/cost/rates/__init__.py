"""Rates that hardware achieves in matmuls, attention, collectives and memory traffic, and where they are from."""
