"""Plans as files: YAML, or JSON where the name ends so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from meshwright.errors import MeshwrightError
from meshwright.files import write_file


def write_data(data: dict[str, Any], path: Path) -> None:
    """Write plain data: as JSON to a `.json`, else as YAML."""
    if path.suffix == ".json":
        text = json.dumps(data, indent=2) + "\n"
    else:
        import yaml  # A tenth of a second that plans without a file need not wait for.

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_file(path, text)


def has_fields(data: Any) -> TypeGuard[dict[str, Any]]:
    """Whether plain data is an object, fields by name, and no list, text or number."""
    return isinstance(data, dict)


def read_data(path: Path) -> Any:
    """The plain data of a file, as `write_data` wrote it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise MeshwrightError(f"{path} is not JSON: {error}") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MeshwrightError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
