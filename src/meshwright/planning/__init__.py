"""Plan a mesh for a model, chips and a batch: predict and rank every legal mesh, and return the best as a plan.

`cost` sums flops, collectives, memory and seconds over the ops of a step. `prediction` predicts one mesh from them,
`space` lists the meshes and strategies, `search` ranks them, `why` explains the result, `serving` plans servers.
Read `library` first, which has `meshwright.plan`. Nothing here imports JAX, so a plan takes half a second.

The remat policy is chosen by `search` too, from those that `space` lists, unless an option gives it.
"""
