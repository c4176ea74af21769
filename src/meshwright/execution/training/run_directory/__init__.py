"""The run directory: the files that a run keeps on disk, and resuming from them.

`run` has the config and the metrics; `checkpoint` writes and reads checkpoints (`frozen`; checksums are in `support`);
`saver` decides when to write. `restart` resumes a run from its last complete checkpoint, whose model, data, tokenizer
and optimizer are compared in `compatible`. `resume` has the settings that a resumed run may change, and `begun_with`
compares the command. `resolved` writes the run's options; `lock` excludes other processes.
"""
