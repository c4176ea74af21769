"""Compile programs for hardware that is not present, and read the compiled programs.

`targets` has the environment that each compiler needs. `compile` runs one child process per core, as far as memory
allows, and caches programs under `$XDG_CACHE_HOME/meshwright` by request, versions and sources. `process` starts a
child process and reads its response, `worker` is the child's program; they exchange JSON files, also for failures. A
function that is inspected for a target is lowered where it is called, for the target's platform, and sent as a
StableHLO module (`module`).

A `CompiledProgram` has the optimized HLO and three modules from before and after the partitioner's passes: with
requested shardings, with the shardings of every value, and partitioned. `shardings` pairs requested and actual
shardings. `records` restores op_names that the partitioner drops (JAX 0.11). `full_rematerializations` reads XLA's
warnings.
"""
