"""Lay out any traced JAX function on a mesh: equal dims form a class, and a table maps classes to mesh axes.

An atom is an integer that stands for a dim, or for a factor of a reshaped dim (`dims`). `trace` traces a function and
unites the atoms of equal dims, so that one atom identifies a class, with a rule for each JAX primitive (`rules`);
`arrays` binds the leaves of its arguments that are not arrays. `classes` names the resulting classes. `apply` is
`meshwright.apply`: the same function with the sharding constraints of a table. Read `apply` first.

`flat` and `work` list the function's work: matmuls, reductions and values in memory. A `layout` assigns mesh axes to
classes, `price` predicts its record, and `search` finds the best layout (`proof.program_plans` compiles it).
"""
