"""Forward passes of models, run from their ops and declared parameters: in a loop over layers, or in pipeline stages.

A model uses logical axes and a `ShardingContext`, never the mesh. Three calls cause every collective of a train step:

- `ShardingContext.weight` gathers a parameter over the mesh axes that its stored shards split. The result is typed
  `reduced` over all axes that split tokens, so that its gradient is unreduced, and backward runs a reduce-scatter onto
  the shards, then an all-reduce over replicas.
- `ShardingContext.place(h, …, reduced=tp)` gathers the residual stream before matmuls that tp splits; its gradient is
  reduce-scattered.
- A matmul whose contracted dim is split over tp gets an `out_sharding` that is `unreduced` over tp; resharding its
  result to the spec of the residual stream is a reduce-scatter.

A layer runs op by op (`layer`), with one function for each type of op in `step.layer`. Consecutive matmuls with the
same input run together; experts, from dispatch to combine, run in one `shard_map`. Layers whose windows or rotary
frequencies differ still run in one loop: each layer selects its own window and frequencies by its number. `linear` has
the matmuls that read the residual stream or add to it; with the strategy's `collective_matmul` they run as rings.
`shard_map` is used where sharding types cannot express the program: the lookup in an embedding table whose vocab is
split (`ends`), rings, attention over a split sequence, and expert dispatch (`moe`). Norm scales are replicated, and
their gradients are all-reduced in each layer, because elementwise products do not support `reduced` types (JAX 0.10.2).

A remat policy saves named values (`checkpoint_name`). Gathered weights have no name, so no policy saves them. Attention
that materializes its scores has its own backward (`attention`): scores are never divided or transposed, and a device
that has a whole sequence computes no scores of the first half's queries with the second half's keys. Norms have their
own backward too (`norm`).

The latents of latent attention are replicated over tp, and their gradients are summed over tp. In generation the cache
holds the latents, and queries are projected into latent space (`latent_attention`). A low-rank adapter is a field of a
matmul or a lookup (`step.lora`), so its weights are declared, planned and run like others. Dropout masks depend on
seed, step, layer and token, never on the mesh (`dropout`).
"""
