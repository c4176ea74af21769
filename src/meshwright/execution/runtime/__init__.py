"""Run sharded computation: meshes, sharding contexts, attention kernels, experts, pipelines, sharded products.

Meshes are explicit (`AxisType.Explicit`). All six axes are always present; those of degree 1 are left out of every
spec. The compiled program has the same collectives as the plan, equal in kind, axes and bytes, on XLA:CPU and on the
TPU compiler. XLA:CPU makes no reduce-scatter of the partitioner's: it all-reduces and slices, and `hlo.canonical`
recognises that.

A pipeline is one program in lockstep: its stages are one more dim of every array, split over pp and mapped over. In a
layer, `shards` keeps stages apart under `vmap`. 1F1B lends the inputs that early stages keep to late ones
(`pipeline.bpipe`), so that every device holds p microbatches. Dense layers before those of experts run with the
embedding lookup: every stage runs them for its share of a microbatch's sequences, and the residual stream is gathered
over pp before the first stage takes it (`pipeline.inject`). Where pp does not divide the sequences, every stage runs
them for all, and the plan says so. Gradients of replicated parameters are summed once a step (`replicas`).

Matmuls of experts are grouped ones where a compiler has them: XLA:TPU, except for the gradients of weights. Elsewhere a
loop multiplies blocks of one expert's rows, as many as the routing needs (`experts.products`).
"""
