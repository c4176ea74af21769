"""Forward passes of models, run from their ops and declared parameters: in a loop over layers, or in pipeline stages.

A model uses logical axes and a `ShardingContext`, never the mesh. Three calls cause every collective of a train step:

- `ShardingContext.weight` gathers a parameter over the axes that store it. The result is typed `reduced` over all axes
  that split tokens, so that its gradient is unreduced, and backward runs a reduce-scatter onto the shards, then an
  all-reduce over replicas.
- `ShardingContext.place(h, …, reduced=tp)` gathers the residual stream before matmuls that tp splits; its gradient is
  reduce-scattered.
- A matmul whose contracted dim tp splits gets an `out_sharding` that is `unreduced` over tp; resharding its result to
  the spec of the residual stream is a reduce-scatter.

A layer runs op by op (`layer`): one lowering for each kind of op of `step.layer`. Consecutive matmuls of one value run
together; experts, from dispatch to combine, run in one `shard_map`. Layers whose windows or rotary frequencies differ
still run in one loop: each selects its own by layer number. Blocks read the residual stream and add to it in `linear`,
which runs rings with `collective_matmul`. `shard_map` is used where types cannot express the program: the lookup in an
embedding table whose vocab is split (`ends`), rings, attention over a split sequence, and expert dispatch (`moe`). Norm
scales are replicated, and their gradients are all-reduced in each layer, because elementwise products do not support
`reduced` types (JAX 0.10.2).

A remat policy saves named values (`checkpoint_name`). Gathered weights have no name, so no policy saves them. Attention
through scores has its own backward (`attention`): scores are never divided or transposed, and a device that has a whole
sequence computes no scores of the first half's queries with the second half's keys. Norms have their own backward too
(`norm`).

Attention latents are replicated over tp, and their gradients are summed over tp. In generation the cache holds the
latents, and queries are projected into latent space (`latent_attention`). Low-rank adapters are a field of a matmul
or a lookup (`step.lora`), so their weights are declared, planned and run like others. Dropout masks depend on seed,
step, layer and token, never on the mesh (`dropout`).
"""
