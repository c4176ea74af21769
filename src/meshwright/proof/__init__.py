"""Read what compilers make of a program, and compare it with the plan and with a measured run.

`compiler` compiles for hardware that is not present, `simulate` runs the scheduled program in time, `verification`
names each difference between a plan and its program, `inspection` finds mistakes in any JAX function. Begin with
`verification.plans` or `inspection.functions`.
"""
