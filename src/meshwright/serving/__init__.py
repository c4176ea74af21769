"""Serve a model: continuous batching over a paged KV cache on a mesh, and HTTP endpoints for common clients.

`engine` is the server's core, `http` its endpoints, `front` a reverse proxy for several replicas, `load` the load
generator of `bench-serve`; `offline` runs a file of prompts through the engine. `library` has `meshwright.serve`,
`server` implements it, `plan` reads its options from a serving plan. Begin with `engine.engine`.
"""
