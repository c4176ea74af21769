"""The run directory: the files that a run keeps on disk, and resuming from them."""
