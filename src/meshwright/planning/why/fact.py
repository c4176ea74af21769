"""The base of all facts."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """Something worth saying of a plan: its numbers are the fields, and `str` is the sentence."""

    def to_json(self) -> dict[str, Any]:
        """Return the fact as plain data: its kind in snake case, its numbers and the sentence."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        return {"fact": kind, **asdict(self), "text": str(self)}
