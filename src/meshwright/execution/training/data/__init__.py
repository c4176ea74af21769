"""The data of a run: opened sources, their rows, and the batch of any step.

grain shuffles (`mixture`, `pair_batches`). Other parts of grain (0.2.18) are not used. Its packing can only be
iterated, so that the batch of a step could not be read by the step's number; and it packs tokens, at 4,000 rows per
second, where `packing` packs lengths, at 1.5 million. `MapDataset.mix` has another order, which would change the data
of existing runs, and does not count epochs. grain's prefetching skips a batch that fails.
"""
