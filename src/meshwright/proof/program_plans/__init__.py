"""Plans of any JAX function: `plan` compiles its best layouts (`proof.programs`) and keeps the fastest.

`fit` trains with a planned step. `constraints` finds the fewest constraints in the user's own files (`sources`) with
which the function compiles to a plan, and `edits` writes them.
"""
