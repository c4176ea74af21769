"""How other training frameworks run a step: a TOML file each, in `data/`, every field with its source.

`framework.load_framework` reads one; a step is planned as that framework runs it, and not run.
"""
