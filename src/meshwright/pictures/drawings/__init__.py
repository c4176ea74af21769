"""Drawings as sketches: arrays, products, meshes on a torus, collectives and rings, pipelines, rooflines, memory.

`holdings` has what each device holds, without JAX; `showing` of the wing joins sketches to pictures.
"""
