"""What everything else speaks of: the notation, hardware, a model's step as data, model families, programs in HLO.

Plain frozen data without JAX. Begin with `notation` (`A[I_X, J] @ B[J, K_Y]` and the collectives it needs), then
`step.ir`, the ops of a step, and `step.train`, which builds a training step and applies the passes. `hardware` has
chips and fabrics with the source of each figure, `families` a file per model family, `hlo` a compiled program's text as
data.
"""
