"""Kinds of bad records, what is done with them, and their counts.

Records of a kind in `SKIPPED` are always left out and counted. A record of another kind raises an error with file and
line, or with the rule `skip` is left out and counted too.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from meshwright.errors import MeshwrightError

Rule = Literal["error", "skip"]
"""Rule for bad records: `error` stops and names the record, `skip` leaves it out and counts it."""

Kind = Literal["broken", "invalid_utf8", "missing_field", "chat", "over_vocab", "too_long", "empty", "no_loss"]

KINDS: dict[Kind, str] = {
    "broken": "lines that are no JSON object",
    "invalid_utf8": "lines or texts that are not UTF-8",
    "missing_field": "records without a field, or with one of another type",
    "chat": "chats that the template does not take",
    "over_vocab": "documents with token ids outside the vocabulary",
    "too_long": "prompts that leave no room for a token",
    "empty": "empty documents",
    "no_loss": "documents in which no token has loss",
}
"""{kind of bad records: its description in messages, after a count}."""

SKIPPED: frozenset[Kind] = frozenset({"empty", "no_loss"})
"""Kinds that are always left out and counted, because such records have nothing to learn, as in other tools."""


class BadRecordError(MeshwrightError):
    """A record cannot be used. kind: one of `KINDS`; the message is the reason, without the record's location."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind


class BadData:
    """Applies a rule to bad records. counts: number of records that were left out, by kind."""

    def __init__(self, rule: Rule) -> None:
        self._rule: Rule = rule
        self.counts: Counter[str] = Counter()

    def add(self, error: BadRecordError, place: str) -> None:
        """Count a bad record, or raise if the rule does not skip it.

        Args:
            error: what is wrong.
            place: where the record is, for example `wiki.jsonl, line 70,001`.
        """
        if error.kind not in SKIPPED and self._rule == "error":
            raise MeshwrightError(f"{place}: {error}; --bad-data skip leaves such records out and counts them")
        self.counts[error.kind] += 1


def describe_bad(counts: dict[str, int]) -> str:
    """Return the counts of bad records by kind as text for the user; empty if there are none."""
    return ", ".join(f"{count:,} {KINDS[kind]}" for kind, count in counts.items() if kind in KINDS and count)
