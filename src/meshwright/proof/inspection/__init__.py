"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes.

`functions` accepts a function and compiles it. `run_checks` runs all checks on one program (`context.ProgramContext`).
Each check is a file of `checks/` with a subclass of `finding.Finding`, which has the evidence and the fix. `variance`
finds along which mesh axes each value may differ between devices; redundant compute and duplicate reductions follow
from it. `meshes` replaces the function's meshes by a target's. `hlo.updates` finds the arguments that a program
computes updates of: its state. `advice` explains JAX's own sharding errors, with a line of code that works.
"""
