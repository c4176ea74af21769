"""General utilities that know nothing of meshes: files, encoding, signals, checks of fields, notebook output.

Begin with `files`, the only writer of files, which writes them completely or not at all.
"""
