"""Passes over the ops of a step: from the ops of a model on logical dims to what devices run.

In the order that `step.train` runs them: `shard` assigns mesh axes to every value (`shard_ends` outside the layers,
`shard_experts` for experts) and builds `nodes`; `differentiate` adds backward ops, weight gathers and gradient
reductions; `rematerialize` selects the ops to recompute; `microbatch` and `pipeline` (`schedule`) count how often each
region runs; `optimizer` (`muon`) adds the update.
"""
