"""Pictures of shardings, collectives, pipelines and runs in a terminal, a notebook, SVG or HTML.

A picture is a `scene` of boxes, lines and labels, which `terminal` or `svg` writes. `showing` has `meshwright.show`.
HTML pages are in `pages` (of an inspection or a verification) and `report` (of runs), and consist of `sections`.
Matplotlib draws the other charts: `charts` has those of plans and shared code, every other chart has a file of its own,
such as `load_chart`. `tables` and `text` lay out the output of commands.
"""
