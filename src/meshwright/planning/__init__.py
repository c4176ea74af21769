"""Plan a mesh for a model, chips and a batch: price and rank every legal mesh, and keep the best as a plan.

`cost` sums over the ops of a step: flops, collectives, memory, seconds. `prediction` prices one mesh with it, `space`
lists the meshes and strategies, `search` ranks them, `why` explains the result, `serving` does the same for servers.
Begin with `library`, which has `meshwright.plan`. Nothing here imports JAX, so a plan takes half a second.
"""
