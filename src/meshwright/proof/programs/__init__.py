"""Lay out any traced JAX function on a mesh: its dims are unified into a few classes, which a table maps to mesh axes.

`trace` traces a function and unifies the dims of its values (`dims`), with a rule for each JAX primitive (`rules`);
`arrays` binds what in its arguments is no array. `classes` names the classes that result. `apply` is
`meshwright.apply`: the same function with the constraints of a table. Begin with `apply`.

`flat` and `work` read what the function does: its matmuls, sums and values in memory. `layout` says which axes split
which classes, `price` predicts the record of a layout, and `search` finds the best (`proof.program_plans` compiles it).
"""
