"""Convert a plan to the settings of another training framework (`export`), and such settings to a plan (`imports`).

`data/` has a table for each framework: the plan's field that each option sets, and the options that do not affect a
step. Options that set several fields together (degrees, batches, pipelines) are read and written by the framework's
module.
"""
