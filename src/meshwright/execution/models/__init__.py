"""Forward passes over a model's ops and its declared parameters; in a loop over layers, or in stages of a pipeline.

A model knows logical axes and a `ShardingContext`, never the mesh. Three calls make every collective of a train step:

- `ShardingContext.weight` gathers a parameter over the axes that store it. The result is typed `reduced` over all axes
  that split tokens, so that its gradient is unreduced, and backward makes a reduce-scatter onto the shards, then an
  all-reduce over replicas.
- `ShardingContext.place(h, …, reduced=tp)` gathers the residual stream before matmuls that tp splits; its gradient is
  reduce-scattered.
- A matmul whose contraction tp splits is asked for with an `out_sharding` that is `unreduced` over tp, and placed on
  the spec of the residual stream: a reduce-scatter.

A layer runs op by op (`layer`): one lowering for each kind of op of `step.layer`, consecutive matmuls of one value
together, experts from dispatch to combine as one program on each device. Layers whose windows or rotary frequencies
differ are still one loop: each takes its own by its number. `linear` is where blocks leave the residual stream and join
it again; with `collective_matmul` as rings. `shard_map` is used where types cannot say it: the lookup in an embedding
table whose vocab is split (`ends`), rings, attention over a split sequence, and the exchange of tokens with experts
(`moe`). Norm scales are kept whole: `reduced` types do not pass through an elementwise product (JAX 0.10.2), so their
gradients are all-reduced in each layer.

A remat policy saves what has a name (`checkpoint_name`). Gathered weights have none, so no policy saves them. Attention
through scores has its own backward (`attention`): scores are never divided or transposed, and where a device has a
whole sequence, the first half of its queries makes no scores for the keys of the second half. Norms have their own
backward too (`norm`).

Latents of attention are computed whole on every device of tp, and their gradients summed over it. In generation the
cache holds the latents, and queries are multiplied into them (`latent_attention`). Adapters of low rank are a field of
a matmul (`step.lora`), so that their weights are declared, planned and run as others are. What dropout draws follows
from seed, step, layer and token, never from the mesh (`dropout`).
"""
