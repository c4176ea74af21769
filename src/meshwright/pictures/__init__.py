"""Pictures of shardings, collectives, pipelines and runs in a terminal, a notebook, SVG or HTML.

A picture is a `scene` of boxes, lines and labels, which `terminal` or `svg` writes. `showing` has `meshwright.show`.
HTML pages are in `pages` (of an inspection or a verification) and `report` (of runs), and consist of `sections`. Charts
drawn by Matplotlib have one file each: `load_chart` is the pattern to copy; `charts` has the charts of plans and shared
code. `tables` and `text` lay out the output of commands.
"""
