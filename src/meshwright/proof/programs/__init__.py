"""Lay out any traced JAX function on a mesh: its dims are unified into a few classes, which a table maps to mesh axes.

`trace` traces a function and unifies the dims of its values (`dims`), with a rule for each JAX primitive (`rules`);
`arrays` binds the leaves of its arguments that are not arrays. `classes` names the resulting classes. `apply` is
`meshwright.apply`: the same function with the sharding constraints of a table. Read `apply` first.

`flat` and `work` list the function's work: matmuls, reductions and values in memory. A `layout` assigns mesh axes to
classes, `price` predicts its record, and `search` finds the best layout (`proof.program_plans` compiles it).
"""
