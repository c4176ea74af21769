"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes.

`functions` accepts a function and compiles it; `run_checks` runs all checks on one program (`context.ProgramContext`),
each a file of `checks/` with its subclass of `finding.Finding`, which has the evidence and the fix. `variance` finds
along which mesh axes each value may differ between devices; redundant compute and duplicate reductions follow from it.
`meshes` replaces the function's meshes by those of a target. `hlo.updates` finds the arguments that a program computes
an update of: its state. `advice` answers JAX's own errors about shardings with their cause and a line of code that
works.
"""
