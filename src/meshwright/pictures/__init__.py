"""Pictures of shardings, collectives and pipelines in a terminal, a notebook or SVG.

Charts; HTML pages in `pages`.
"""
