"""Lay out any traced JAX function on a mesh: its dims are unified into a few classes, which a table maps to mesh axes.

`trace` traces a function and unifies the dims of its values (`dims`), with a rule for each JAX primitive (`rules`).
`classes` names the classes that result. `apply` is `meshwright.apply`: the same function with the constraints of a
table. `constraints` finds the fewest constraints in the user's own files (`sources`) with which the function compiles
to a plan, and `edits` writes them. Begin with `apply`.
"""
