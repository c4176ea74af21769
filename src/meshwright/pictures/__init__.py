"""Pictures of shardings, collectives and pipelines in a terminal, a notebook or SVG.

Charts are in `charts`, HTML pages in `pages`.
"""
