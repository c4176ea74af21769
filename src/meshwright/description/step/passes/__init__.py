"""Passes over the ops of a step: from the ops of a model on logical dims to what devices run.

In the order that `step.train` runs them: `shard` gives every value its mesh axes (`shard_ends` and `shard_experts`
outside the layers and for experts), and makes `nodes`; `differentiate` adds backward, and the gather of every weight
with the sum of its gradient; `rematerialize` says what is computed again; `microbatch` and `pipeline` (`schedule`) say
how often each region runs; `optimizer` (`muon`) adds the update.
"""
