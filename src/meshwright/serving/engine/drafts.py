"""Draft tokens by n-grams: the tokens that followed an earlier occurrence of a text's last tokens (prompt lookup).

Apoorv Saxena, Prompt Lookup Decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable


class NgramDrafts:
    """Index of the latest positions of the n-grams of one text.

    Args:
        longest: tokens of the longest n-gram looked up; shorter ones are tried if it is not found.
        shortest: tokens of the shortest n-gram; a single token predicts little.
    """

    def __init__(self, tokens: Iterable[int], *, longest: int = 4, shortest: int = 1) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # For each n-gram that is followed by a token: the position after its latest occurrence.
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text, in time that does not depend on its length."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the latest earlier occurrence of the text's last n-gram.

        If that occurrence is near the end, the draft repeats the tokens from there to the end.
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
    """Placeholder for drafts that a model computes on the devices; same methods as `NgramDrafts`."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Do nothing: the draft model reads the tokens itself."""

    def draft(self, most: int) -> list[int]:
        """Return `most` placeholders, which the devices replace with draft tokens."""
        return [0] * most
