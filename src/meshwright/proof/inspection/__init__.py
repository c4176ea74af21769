"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes."""
