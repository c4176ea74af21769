"""What is wrong with a program, one thing at a time: evidence, what it costs, where it comes from, what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingKind = Literal[
    "replicated parameter",
    "constraint without effect",
    "full rematerialization",
    "unplanned collective",
    "all-reduce for reduce-scatter",
    "gathered twice",
    "reduced twice",
    "repeated work",
    "mesh against the fabric",
    "exposed communication",
    "padding",
    "uneven stages",
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake that a compiled program shows.

    evidence: what was seen, with its figures. bytes: what it costs a device in a step, sent or held, as the evidence
    says. seconds: what it costs a step; None where no figure of the hardware says. source: file:line (scopes), '' where
    the compiler kept none. fix: what to change.
    """

    kind: FindingKind
    evidence: str
    bytes: int
    seconds: float | None
    source: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        """This finding as plain data."""
        return asdict(self)
