"""The library's answers as objects: `matmul`, `collective`, `pipeline`, `chips` and `devices`.

Each has fields, prints itself like the command of the same name, and converts to HTML, SVG and plain data. `answer` is
their base class; `given` reads their arguments and applies defaults.
"""
