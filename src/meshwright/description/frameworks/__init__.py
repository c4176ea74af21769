"""How other training frameworks run a step: one TOML file each, in `data/`, every field with its source.

`framework.load_framework` reads one. Steps of other frameworks are only predicted, not run.
"""
