"""The run directory: the files that a run keeps on disk, and resuming from them.

`run` has the config and the metrics, `checkpoint` writes and reads checkpoints (`checksums`, `frozen`), `saver` decides
when. A run that is resumed goes through `restart`: its last complete checkpoint, whose identity (model, data,
tokenizer, optimizer) is compared in `compatible`; `resume` has the settings that a resumed run may change, and
`begun_with` compares the command. `resolved` writes the options of the run, `lock` keeps other processes out.
"""
