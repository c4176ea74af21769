"""Kinds of bad records, the rule for each, and their counts.

Records of kinds in `SKIPPED` are left out and counted. Others raise an error with file and line, unless the rule is
`skip`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from meshwright.errors import MeshwrightError

Rule = Literal["error", "skip"]
"""Rule for unusable records: `error` stops and names the record, `skip` leaves it out and counts it."""

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
"""The kinds of bad records, each described for messages."""

SKIPPED: frozenset[Kind] = frozenset({"empty", "no_loss"})
"""Kinds with nothing to learn from: always left out and counted, as in other training tools."""


class BadRecordError(MeshwrightError):
    """A record that cannot be used. kind: one of `KINDS`; the message is the reason, without the record's location."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind


class BadData:
    """Applies the rule to each bad record and counts bad records by kind."""

    def __init__(self, rule: Rule) -> None:
        self._rule: Rule = rule
        self.counts: Counter[str] = Counter()

    def add(self, error: BadRecordError, place: str) -> None:
        """Count a bad record, or raise if the rule does not skip it.

        Args:
            error: what is wrong.
            place: where the record is, such as `wiki.jsonl, line 70,001`.
        """
        if error.kind not in SKIPPED and self._rule == "error":
            raise MeshwrightError(f"{place}: {error}; --bad-data skip leaves such records out and counts them")
        self.counts[error.kind] += 1


def describe_bad(counts: dict[str, int]) -> str:
    """Return the counts of bad records as a note; empty if there are none."""
    return ", ".join(f"{count:,} {KINDS[kind]}" for kind, count in counts.items() if kind in KINDS and count)
