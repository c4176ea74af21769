"""Pictures of shardings, collectives, pipelines and runs in a terminal, a notebook, SVG or HTML.

A picture is a `scene` of boxes, lines and labels, written by `terminal` or `svg`. `showing` is `meshwright.show`. HTML:
`pages` of an inspection or a comparison, `report` about runs, made of `sections` and `panels`. Charts drawn by
Matplotlib have a file each: `load_chart` is the pattern to copy, `charts` has the plan's and what all charts share.
`tables` and `text` lay out what commands print.
"""
