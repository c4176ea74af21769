"""Plans of any JAX function: `plan` compiles its best layouts (`proof.programs`) and keeps the fastest.

`fit` trains with a planned step. `constraints` finds the fewest sharding constraints in the user's files (`sources`)
that make the function compile to its plan, and `edits` writes them.
"""
