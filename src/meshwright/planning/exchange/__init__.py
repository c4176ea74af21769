"""Settings of other training frameworks: a plan written as theirs (`export`), and theirs read as a plan (`imports`).

`data/` has a table for each framework: which of its options is which field here, and which change nothing of a step.
Options that are more than one field (degrees, batches, pipelines) are read and written by the framework's own module.
"""
