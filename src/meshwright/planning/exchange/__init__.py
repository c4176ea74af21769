"""Convert a plan to the settings of another training framework (`export`), and settings to a plan (`imports`).

`data/` has a table for each framework: the field of each option, and the options that do not affect a step. Options
that map to several fields (degrees, batches, pipelines) are read and written by the framework's module.
"""
