"""Read text files and JSON Lines; error messages name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError


def read_text(path: Path) -> str:
    """Return the text of a file. Raises if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MeshwrightError(f"{path} is not UTF-8 text") from None


def json_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (location for error messages, object) for each line of a JSON Lines file that is not blank.

    Raises:
        MeshwrightError: the file cannot be read, or a line is not a JSON object.
    """
    objects = []
    # Split only at newlines: `splitlines` would also split at U+2028, which JSON strings may contain.
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MeshwrightError(f"{place}: this is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise MeshwrightError(f"{place}: this is a {type(data).__name__}; each line holds an object")
        objects.append((place, data))
    return objects
