"""Draft tokens from n-grams (prompt lookup): the tokens that followed an earlier occurrence of a sequence's last ones.

Apoorv Saxena, Prompt Lookup Decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable


class NgramDrafts:
    """The tokens of one sequence, with an index from each n-gram to the position after its latest occurrence.

    Args:
        tokens: the first tokens.
        longest: number of tokens of the longest n-gram looked up; shorter ones are tried if it is not found.
        shortest: number of tokens of the shortest n-gram looked up.
    """

    def __init__(self, tokens: Iterable[int], *, longest: int = 4, shortest: int = 1) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # For each n-gram that is followed by a token: the position after its latest occurrence.
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the sequence. The time does not depend on its length."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """Return the `most` tokens that followed the latest earlier occurrence of the sequence's last n-gram.

        If fewer tokens followed it, they are repeated. Returns no tokens if no n-gram occurred before.
        """
        length = len(self._tokens)
        for size in self._sizes:
            if size > length:
                continue
            begin = self._ends.get(tuple(self._tokens[length - size :]))
            if begin is not None:
                return [self._tokens[begin + at % (length - begin)] for at in range(most)]
        return []


class ModelDrafts:
    """Used in place of `NgramDrafts` if a draft model computes the draft tokens on the devices."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Do nothing: the draft model reads the tokens itself."""

    def draft(self, most: int) -> list[int]:
        """Return `most` placeholders, which the devices replace with draft tokens."""
        return [0] * most
