"""Plans of any JAX function: `plan` compiles its best layouts (`proof.programs`) and keeps the fastest.

`fit` trains with a step in such a layout.
"""
