"""Drawings as sketches: arrays, matmuls, meshes on a torus, collectives and rings, pipelines, rooflines, memory.

`holdings` computes each device's part of an array, without JAX. `pictures.showing` joins sketches to pictures.
"""
