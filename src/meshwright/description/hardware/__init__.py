"""Chips and their networks as data, and the links that each mesh axis uses.

`data/` has a TOML file per chip, with the source of each figure; `load` reads them.
"""
