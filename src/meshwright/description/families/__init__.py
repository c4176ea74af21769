"""Model families: one file each, with its config.json, weight names and presets.

To add a family, add a file and a line in `registry.py`. Its layers are built from the features of its `ModelConfig`s
(`step.blocks`), or by its own subclass of `Family`.
"""
