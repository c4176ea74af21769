"""Plan shardings for any traced JAX function: its dims are unified into a few classes, which a table maps to mesh axes.

`dims` has the union of dims, `rules` what each JAX primitive says of them, `trace` applies the rules to a function, and
`classes` names what was found. `apply` makes the same function with the constraints of a table. Begin with `apply`.
"""
