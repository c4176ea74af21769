"""Training: the compiled step and its state (`step`), its data (`data`), and the loop that takes steps (`loop`).

`library` has `meshwright.train`, `run_directory` the files of a run; `watch` measures and evaluates it.
"""
