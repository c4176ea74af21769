"""Rates that hardware achieves in matmuls, attention, collectives and memory traffic, from published measurements."""
