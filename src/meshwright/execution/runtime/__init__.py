"""Run sharded computation: meshes, sharding contexts, attention kernels, experts, pipelines, sharded matmuls.

Meshes are explicit (`AxisType.Explicit`). All six axes are always present; axes of degree 1 are left out of every spec.
The compiled program has the collectives of the plan, equal in kind, axes and bytes, on XLA:CPU and on the TPU compiler.
XLA:CPU lowers a reduce-scatter to an all-reduce and a slice, which `hlo.canonical` recognises as a reduce-scatter.

A pipeline is one program that all stages run in lockstep: every array has a stage dim, sharded over pp and mapped by
`vmap`; `shards.on_shards` is a `shard_map` that works under this `vmap`. If layers of several kinds alternate, a stage
has whole cycles of them. 1F1B sends saved layer inputs of early stages to late stages (`pipeline.bpipe`), so that every
device holds the inputs of pp microbatches. Dense layers before the MoE layers run with the embedding lookup: every
stage runs them on its share of a microbatch's sequences, and the residual stream is gathered over pp before the first
stage reads it (`pipeline.inject`). If pp does not divide the number of sequences, every stage runs these layers on all
sequences, and the plan reports this. Gradients of replicated parameters are summed once per step (`replicas`).

Expert matmuls are ragged dots if the compiler supports them: XLA:TPU does, except for weight gradients. Elsewhere a
loop multiplies blocks of one expert's rows, as many blocks as the routing needs (`experts.products`).
"""
