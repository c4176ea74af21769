"""The order of the rows of a run: the source and row number of the n-th row, which depend only on the seed and n."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.rows import Rows

PERIOD = 10_000
"""Number of rows after which the order of sources in a mixture repeats; weights are rounded to 1/10,000."""


class Mixture:
    """The shuffled rows of several sources, in proportion to their weights, or to their sizes if they have none.

    A row is repeated only after all rows of its source were used.

    Args:
        sources: the rows of each source.
        weights: a weight for each source; None for none.
        seed: determines the order.
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
        # Rows of each shuffled order in the pattern, before each position and in all.
        chosen = self._pattern[:, None] == np.arange(len(orders))
        self._before, self._each = np.cumsum(chosen, axis=0) - chosen, chosen.sum(axis=0)

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for the rows `numbers` [n] of the run, their sources [n] and their row numbers in these [n]."""
        cycles, places = np.divmod(numbers, len(self._pattern))
        orders = self._pattern[places]
        ranks = cycles * self._each[orders] + self._before[places, orders]
        items = np.array([int(self._orders[order][int(rank)]) for order, rank in zip(orders, ranks, strict=True)])
        if self._is_weighted:
            return orders, items
        sources = np.searchsorted(self._firsts, items, side="right") - 1
        return sources, items - self._firsts[sources]

    def epochs(self, number: int) -> list[float]:
        """Return, for each source, how many times all its rows were read before row `number` of the run, as 1.5."""
        cycle, place = divmod(number, len(self._pattern))
        if not self._is_weighted:
            return [number / sum(rows.count for rows in self.sources)] * len(self.sources)
        ranks = cycle * self._each + self._before[place]
        return [int(rank) / rows.count for rank, rows in zip(ranks, self.sources, strict=True)]


def _pattern(sources: Sequence[Rows], weights: Sequence[float]) -> np.ndarray:
    """Return the source of each row in a period [PERIOD], with the rows of each source spread evenly.

    Raises:
        MeshwrightError: a weight is too small for one row in a period.
    """
    shares = np.array(weights, float) / sum(weights) * PERIOD
    counts = np.floor(shares).astype(int)
    for number in np.argsort(counts - shares, kind="stable")[: PERIOD - counts.sum()]:
        counts[number] += 1
    if not counts.all():
        name = sources[int(np.argmin(counts))].name
        raise MeshwrightError(f"the weight of {name} is under a {PERIOD:,}th of all; give it more, or leave it out")
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]
