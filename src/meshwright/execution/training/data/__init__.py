"""The data of a run: opened sources, their rows, and the batch of any step.

grain shuffles (`mixture`, `pair_batches`). The rest is not grain's (0.2.18): its packing can only be iterated, so
that no step is read by its number, and packs tokens, 4,000 rows a second; from lengths `packing` makes 1.5 million.
`MapDataset.mix` has another order, which would change the steps of runs begun before, and tells no epochs. After a
batch that fails, its prefetch goes on with the next.
"""
