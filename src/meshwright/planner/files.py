"""Plans as files: YAML, or JSON where the name ends so. Whole or not at all, and only over regular files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError


def check_output(path: Path) -> None:
    """Raise where a file cannot be written to a path, before anything is computed for it."""
    if not path.parent.is_dir():
        raise MeshwrightError(f"cannot write {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise MeshwrightError(f"cannot write {path}: it is a directory")


def write_data(data: dict[str, Any], path: Path) -> None:
    """Write plain data: as JSON to a `.json`, else as YAML."""
    check_output(path)
    if path.suffix == ".json":
        text = json.dumps(data, indent=2) + "\n"
    else:
        import yaml  # A tenth of a second that plans without a file need not wait for.

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)  # A device or a pipe: a rename would replace it.
            return
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.rename(path)
    except OSError as error:
        raise MeshwrightError(f"cannot write {path}: {error.strerror}") from None


def read_data(path: Path) -> Any:
    """The plain data of a file, as `write_data` wrote it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise MeshwrightError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
