"""Passes over the ops of a step: from a model's ops on logical axes to the ops that devices run.

`step.train` runs them in this order: `shard` assigns mesh axes to every value (`shard_ends` outside the layers,
`shard_experts` for experts) and builds `nodes`; `differentiate` adds backward ops, weight gathers and gradient
reductions; `rematerialize` selects the ops to recompute; `microbatch` sets the sizes of a microbatch; `pipeline`
(`schedule`) counts how often each region runs; `optimizer` (`muon`) adds the update.
"""
