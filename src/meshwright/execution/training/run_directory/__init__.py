"""The run directory: files that a run keeps on disk, and resuming from them."""
