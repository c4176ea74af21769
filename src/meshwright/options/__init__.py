"""Options of plans, runs and servers, each declared once: its type, its help, and the setting of a run that it sets.

Begin with `plan`, `training` or `serving`: a new option is one field with its text. From these dataclasses follow the
command line and its help (`cli`), the keywords of the library (`keywords`, written by `python tests/test_options.py`),
and what a resumed run may change (`training.SETTINGS`). `declare` has the annotations, `values` reads what people give:
counts, shares, meshes, chips.
"""
