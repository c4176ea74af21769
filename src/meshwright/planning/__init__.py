"""From a model, chips and a batch to a mesh: every legal mesh priced and ranked, the best one as a plan to keep.

`cost` folds over a step: flops, collectives, memory, seconds. `prediction` prices one mesh with it, `space` lists what
could be run, `search` goes through it, `why` says why, `serving` does the same for servers. Begin with `library`, which
is `meshwright.plan`. Imports no JAX, so that a plan is there in half a second.
"""
