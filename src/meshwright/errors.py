"""Exceptions for users; each message states what is wrong, the value and what would be right."""

from __future__ import annotations

from collections.abc import Iterable


class MeshwrightError(ValueError):
    """A user's mistake; the one-line message names the values and what would be right."""


class DoesNotFitError(MeshwrightError):
    """A program does not fit a device's memory.

    hlo: the HLO text of the program that did not fit; '' if the compiler failed before it had one.
    """

    def __init__(self, message: str, hlo: str = "") -> None:
        super().__init__(message)
        self.hlo = hlo


class TemporaryError(MeshwrightError):
    """An error that may go away: the same command can succeed later. Commands exit with 1, not 2."""


class NotationError(MeshwrightError):
    """A syntax error in text of the sharding notation; `position` is the index of the wrong character, from 0."""

    def __init__(self, reason: str, *, text: str, position: int) -> None:
        super().__init__(f"{reason}\n  {text}\n  {' ' * position}^")
        self.reason = reason
        self.text = text
        self.position = position


def near_names(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the names similar to a word, nearest first.

    A name is similar if its `SequenceMatcher` ratio is at least `cutoff`, if it contains the word, or if the word
    begins with it.

    >>> near_names("v4-8", ["v3", "v4", "tpu7x"])
    ['v4']
    """
    from difflib import SequenceMatcher  # Imported here: only error messages need it.

    likeness = {}
    for name in names:
        matcher = SequenceMatcher(None, word, name)
        if (ratio := matcher.ratio()) >= cutoff or word.startswith(name) or (len(word) > 1 and word in name):
            likeness[name] = (ratio, matcher.find_longest_match().size)
    return sorted(likeness, key=lambda name: likeness[name], reverse=True)


def did_you_mean(near: Iterable[str]) -> str:
    """Return a question that suggests the first three names, with a trailing space; '' without names.

    >>> did_you_mean(["v4", "v3"])
    'did you mean v4 or v3? '
    """
    *others, last = list(dict.fromkeys(near))[:3] or [""]
    return f"did you mean {' or '.join(filter(None, [', '.join(others), last]))}? " if last else ""
