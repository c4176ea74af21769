"""Hold out a share of a source's documents or windows, selected by a hash of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError

BLOCK = 1 << 15
"""How many numbers are in memory at a time."""


@dataclass(frozen=True)
class HashSplit:
    """The training part or the held-out part of a source's documents or windows, divided by a hash of their numbers."""

    count: int  # Number of documents or windows of the source, in both parts; they are numbered from 0.
    limit: int | None = None  # Numbers with a hash up to `limit` are held out, the others train; None: all train.
    is_held_out: bool = False  # Whether this is the held-out part.

    @property
    def is_whole(self) -> bool:
        """Whether the part has all documents or windows."""
        return self.limit is None

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the numbers of the part's documents or windows, ascending, in arrays of at most `BLOCK`."""
        for numbers in _blocks(self.count):
            if self.limit is None:
                yield numbers
            else:
                yield numbers[(_hash(numbers) <= np.uint64(self.limit)) == self.is_held_out]

    def write(self, directory: Path) -> None:
        """Write the numbers that `blocks` yields into a file in a directory."""
        with (directory / "numbers").open("wb") as file:
            for numbers in self.blocks():
                file.write(numbers.tobytes())

    def open_numbers(self, directory: Path) -> np.ndarray:
        """Return the numbers written by `write`, memory-mapped."""
        return np.asarray(np.memmap(directory / "numbers", np.int64, "r"))


def split(count: int, share: float, name: str) -> tuple[HashSplit, HashSplit | None]:
    """Return the training part and the held-out part of a source, at least one document or window in each.

    The held-out part is None if `share` is 0. The split depends neither on the seed nor on documents added later.

    Args:
        count: number of documents or windows of the source.
        share: the share to hold out.
        name: the source, for errors.

    Raises:
        MeshwrightError: the source has fewer than two documents or windows, and `share` is not 0.
    """
    if not share:
        return HashSplit(count), None
    if count < 2:
        raise MeshwrightError(f"{name} has {count} documents or windows, of which none can be held out")
    ends = [(int(hashes.min()), int(hashes.max())) for hashes in map(_hash, _blocks(count))]
    limit = min(max(int(share * 2**64), min(low for low, _ in ends)), max(high for _, high in ends) - 1)
    return HashSplit(count, limit), HashSplit(count, limit, is_held_out=True)


def _blocks(count: int) -> Iterator[np.ndarray]:
    for start in range(0, count, BLOCK):
        yield np.arange(start, min(start + BLOCK, count))


def _hash(numbers: np.ndarray) -> np.ndarray:
    """Hash numbers to 64 bits (SplitMix64, https://doi.org/10.1145/2714064.2660195, figure 17)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
