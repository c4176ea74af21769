"""What is predicted otherwise than the golden records have it, with the cause of each."""

from __future__ import annotations

from collections.abc import Mapping

NAMED_DIFFERENCES: Mapping[tuple[str, str], str] = {}
"""Why, by case and quantity (`fnmatch` of both)."""
