"""The directory of a run: what a run keeps on disk, and how a run starts again from there."""
