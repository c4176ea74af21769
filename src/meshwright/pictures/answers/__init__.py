"""The library's answers as objects: `matmul`, `collective`, `pipeline`, `chips` and `devices`.

An answer has fields, prints itself like the command of the same name, and converts to HTML, SVG and plain data.
`answer` has the base classes; `given` reads the arguments and applies defaults.
"""
