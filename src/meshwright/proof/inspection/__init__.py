"""Inspect any JAX function or HLO text: what its compiled program does, and its mistakes.

`functions` accepts a function, a script (`script`, `run_script`) or HLO text (`dumps`). A function is lowered on its
own mesh or on a target's (`lower`, `meshes`) and compiled. `run_checks` runs all checks on one program
(`context.ProgramContext`). Each check is a file of `checks/` with a subclass of `finding.Finding` that writes its
evidence and fix. To add one, add its kind to `finding.FindingKind` and its function to `run_checks.CHECKS` or
`CHECKS_OF_DATAFLOW`. `jaxprs/` finds the mistakes that only a jaxpr shows. `inspection` has the result: `baseline`
holds findings that do not count, and `sarif` writes the others for code hosts.

`variance` finds along which mesh axes each value may differ between devices; redundant compute and duplicate reductions
follow from it. `hlo.updates` finds the arguments that a program computes updates of: its state. `advice` explains JAX's
own sharding errors, with a line of code that works.
"""
