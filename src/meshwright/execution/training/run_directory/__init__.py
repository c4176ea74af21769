"""The run directory: the files that a run keeps on disk, and resuming from them.

`run` has the config and the metrics. `checkpoint` writes and reads checkpoints, with the checksums of
`support.checksums`; `frozen` handles the parameters that they leave out, `saving` has their settings, and `saver`
decides when to write one. `restart` resumes a run from its last complete checkpoint, whose model, data, tokenizer and
optimizer are compared in `compatible`. `resume` has the settings that a resumed run may change; `begun_with` compares
the model or plan of the command. `resolved` writes the run's options; `lock` keeps other processes out.
"""
