"""Frozen data types shared by all other packages: notation, hardware, steps, model families, HLO. No JAX.

Begin with `notation` (`A[I_X, J] @ B[J, K_Y]` and the collectives it needs), then `step.ir`, the ops of a step, and
`step.train`, which builds a training step and applies the passes. `hardware` has chips and fabrics with the source of
each figure, `families` a file per model family, `hlo` the text of a compiled program as data.
"""
