"""The source and item number of the n-th item of a run, which depend only on the seed and n."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.rows import Rows

PERIOD = 10_000
"""Items after which the order of sources in a mixture repeats; weights are rounded to 1/10,000."""


class Mixture:
    """Shuffled items of several sources in proportion to their weights; without weights, in proportion to their sizes.

    An item is repeated only after all items of its source were used.
    """

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float] | None, seed: int) -> None:
        import grain  # From the extra [train]; it takes a second, which commands that only read a config do not need.

        self.sources = tuple(sources)
        counts = np.array([rows.count for rows in sources])
        self._firsts = np.cumsum(counts) - counts
        if weights is None:
            self._pattern, orders = np.zeros(1, np.int64), [int(counts.sum())]
        else:
            self._pattern, orders = _pattern(self.sources, weights), counts.tolist()
        self._is_weighted = weights is not None
        self._orders = [
            grain.MapDataset.range(count).seed((seed + number) % 2**32).shuffle().repeat()
            for number, count in enumerate(orders)
        ]
        # How often each order occurs in the pattern before each position, and in the whole pattern.
        chosen = self._pattern[:, None] == np.arange(len(orders))
        self._before, self._each = np.cumsum(chosen, axis=0) - chosen, chosen.sum(axis=0)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources [n], and the item numbers in these sources [n], of items of the run."""
        cycles, places = np.divmod(numbers, len(self._pattern))
        orders = self._pattern[places]
        ranks = cycles * self._each[orders] + self._before[places, orders]
        items = np.array([int(self._orders[order][int(rank)]) for order, rank in zip(orders, ranks, strict=True)])
        if self._is_weighted:
            return orders, items
        sources = np.searchsorted(self._firsts, items, side="right") - 1
        return sources, items - self._firsts[sources]

    def epochs(self, number: int) -> list[float]:
        """Return, per source, how often its items were read before item `number`, including partial epochs."""
        cycle, place = divmod(number, len(self._pattern))
        if not self._is_weighted:
            return [number / sum(rows.count for rows in self.sources)] * len(self.sources)
        ranks = cycle * self._each + self._before[place]
        return [int(rank) / rows.count for rank, rows in zip(ranks, self.sources, strict=True)]


def _pattern(sources: Sequence[Rows], weights: Sequence[float]) -> np.ndarray:
    """Return the source of each item in a period, with each source spread evenly [PERIOD]."""
    shares = np.array(weights, float) / sum(weights) * PERIOD
    counts = np.floor(shares).astype(int)
    for number in np.argsort(counts - shares, kind="stable")[: PERIOD - counts.sum()]:
        counts[number] += 1
    if not counts.all():
        name = sources[int(np.argmin(counts))].name
        raise MeshwrightError(f"the weight of {name} is under a {PERIOD:,}th of all; give it more, or leave it out")
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]
