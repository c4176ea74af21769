"""What any program has: files, encoding, signals, checks of fields, what a notebook shows. Knows nothing of meshes.

Begin with `files`: the one writer of files, whole or not at all.
"""
