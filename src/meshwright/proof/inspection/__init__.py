"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes.

`functions` takes a function in and compiles it, `run_checks` runs the checks of `checks/` on one program, one file a
check. `variance` says along which mesh axes each value may differ between devices; redundant compute and duplicate
reductions follow from it. `meshes` has the function's meshes stand for those of a target. `hlo.updates` finds the
arguments that a program computes an update of: its state. `advice` answers JAX's own errors about shardings with their
cause and a line of code that works.
"""
