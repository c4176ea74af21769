"""Model families: one file each, with its config.json, weight names and presets.

A new family is a file, and a line in `registry.py`. Its layers follow from the features of its models (`step.blocks`),
or from a `Family` of its own.
"""
