"""Options of plans, runs and servers, each declared once: its type, its help, and the setting of a run that it sets.

Begin with `plan`, `training` or `serving`: a new option is one field with its help text. An option of one command only
(`--sweep`, `--resume`) is a field of the command's `Args` in `cli`. These dataclasses determine the command line and
its help (`cli`), the keywords of the library (`keywords`, written by `python tests/test_options.py`), and the settings
that a resumed run may change (`training.SETTINGS`). `declare` has the annotations, `given` checks keywords of the
library, `values` parses counts, shares, meshes and chips.
"""
