"""Plan a mesh for a model, chips and a batch: predict and rank every legal mesh, and return the best as a plan.

`cost` sums over the ops of a step: flops, collectives, memory, seconds. `prediction` prices one mesh with it, `space`
lists the meshes and strategies, `search` ranks them, `why` explains the result, `serving` does the same for servers.
Read `library` first, which has `meshwright.plan`. Nothing here imports JAX, so a plan takes half a second.

The remat policy is chosen by `search` too, from those that `space` lists, unless an option gives it.
"""
