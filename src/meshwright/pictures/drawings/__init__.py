"""Sketches of arrays, matmuls, meshes on a torus, collectives and rings, pipelines, rooflines, and memory.

`holdings` computes each device's part of an array, without JAX. `pictures.picture` makes pictures of sketches.
"""
