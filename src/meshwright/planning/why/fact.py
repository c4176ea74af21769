"""The base class of facts about a plan."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One statement about a plan: the fields are its numbers, and `str` returns it as a sentence."""

    def to_json(self) -> dict[str, Any]:
        """Return the fact as plain data: `fact` (its class in snake case), its fields, and `text` (the sentence)."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        return {"fact": kind, **asdict(self), "text": str(self)}
