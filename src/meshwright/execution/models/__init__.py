"""Forward passes of models, run from ops and declared parameters: in a loop over layers, or in pipeline stages.

A model knows logical axes and a `ShardingContext`, never the mesh. Three calls cause every collective of a train step:

- `ShardingContext.weight` gathers a parameter over the axes that store it. The result is typed `reduced` over all axes
  that split tokens, so that its gradient is unreduced, and backward runs a reduce-scatter onto the shards, then an
  all-reduce over replicas.
- `ShardingContext.place(h, …, reduced=tp)` gathers the residual stream before matmuls that tp splits; its gradient is
  reduce-scattered.
- A matmul whose contracted dim tp splits gets an `out_sharding` that is `unreduced` over tp; resharding its result to
  the spec of the residual stream is a reduce-scatter.

A layer runs op by op (`layer`): one lowering for each kind of op of `step.layer`, consecutive matmuls of one value
together, experts from dispatch to combine as one program on each device. Layers whose windows or rotary frequencies
differ still run in one loop: each selects its own by layer number. `linear` is where blocks read the residual stream
and add to it; with `collective_matmul` it runs rings. `shard_map` is used where types cannot express the program: the
lookup in an embedding table whose vocab is split (`ends`), rings, attention over a split sequence, and the exchange of
tokens with experts (`moe`). Norm scales are replicated: `reduced` types do not pass through an elementwise product (JAX
0.10.2), so their gradients are all-reduced in each layer.

A remat policy saves named values (`checkpoint_name`). Gathered weights have no name, so no policy saves them. Attention
through scores has its own backward (`attention`): scores are never divided or transposed, and on a device that has a
whole sequence, the first half of the queries computes no scores for the keys of the second half. Norms have their own
backward too (`norm`).

Attention latents are computed whole on every device of tp, and their gradients are summed over tp. In generation the
cache holds the latents, and queries are multiplied into latent space (`latent_attention`). Low-rank adapters are a
field of a matmul (`step.lora`), so that their weights are declared, planned and run like others. Dropout masks depend
on seed, step, layer and token, never on the mesh (`dropout`).
"""
