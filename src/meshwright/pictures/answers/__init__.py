"""The library's answers as objects: `matmul`, `collective`, `pipeline`, `chips` and `devices`.

Each has fields, prints itself as the command of its name does, and is HTML, SVG and plain data. `answer` is their base
class; `given` reads their arguments and applies defaults.
"""
