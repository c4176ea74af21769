"""Count the batch rows of each owner (client) and group of requests, so that the scheduler can share rows fairly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from meshwright.serving.engine.sequence import TokenSequence


class RowShares:
    """The number of rows in use, by owner (client) and by group of requests."""

    def __init__(self) -> None:
        self._owners = Counter[str]()
        self._groups = Counter[tuple[str, str]]()

    def count(self, sequence: TokenSequence, change: int) -> None:
        """Add (1) or remove (-1) the row of a sequence."""
        self._owners[sequence.request.owner] += change
        self._groups[sequence.group] += change
        if not self._owners[sequence.request.owner]:
            del self._owners[sequence.request.owner]
        if not self._groups[sequence.group]:
            del self._groups[sequence.group]

    def sort_key(self, sequence: TokenSequence) -> tuple[int, int, int]:
        """Return a key to sort sequences by: (rows of the sequence's owner, rows of its group, its order of arrival).

        The waiting sequence with the least key is admitted next; the running one with the greatest is preempted first.
        """
        return self._owners[sequence.request.owner], self._groups[sequence.group], sequence.order

    def displaced_by(self, sequence: TokenSequence, running: Iterable[TokenSequence]) -> TokenSequence | None:
        """Return the running sequence to preempt so that `sequence` gets its row.

        None if the group of `sequence` has a row already, or rows are shared fairly.
        """
        own = sequence.request.owner
        if self._groups[sequence.group]:
            return None

        def may_go(other: TokenSequence) -> bool:
            if other.request.owner == own:
                return self._groups[other.group] > 1
            return self._owners[other.request.owner] > self._owners[own] + 1

        return max(filter(may_go, running), key=self.sort_key, default=None)


def in_turns(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return the first sequence of each group, then the second of each, and so on."""
    counts, turns = Counter[tuple[str, str]](), list[int]()
    for sequence in sequences:
        turns.append(counts[sequence.group])
        counts[sequence.group] += 1
    return [sequence for _, _, sequence in sorted(zip(turns, range(len(turns)), sequences, strict=True))]
