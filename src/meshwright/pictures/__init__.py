"""Pictures of shardings, collectives, pipelines and runs in a terminal, a notebook, SVG or HTML.

A picture is a `scene` of boxes, lines and labels, written by `terminal` or `svg`. `showing` is `meshwright.show`. HTML:
`pages` of an inspection or a comparison, `report` about runs, built from `sections` and `panels`. Charts drawn by
Matplotlib have one file each: `load_chart` is the pattern to copy; `charts` has the plan's charts and shared code.
`tables` and `text` lay out the output of commands.
"""
