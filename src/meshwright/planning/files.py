"""Read and write the files of plans, YAML or JSON; recognise run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from meshwright.errors import MeshwrightError
from meshwright.support.files import check_output, write_file

SUFFIXES = ("", ".yaml", ".yml", ".json")
"""The suffixes that the name of a plan file may have."""


def check_data_file(path: Path) -> None:
    """Raise if a plan cannot be written to a path; called before the plan is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise MeshwrightError(
            f"{path} ends in {path.suffix}; a plan is written as YAML, to a .yaml, or as JSON, to a .json"
        )
    check_output(path)


def write_data(data: dict[str, Any], path: Path) -> None:
    """Write plain data to a file: as JSON if its name ends in `.json`, else as YAML."""
    check_data_file(path)
    if path.suffix.lower() == ".json":
        text = json.dumps(data, indent=2) + "\n"
    else:
        import yaml  # Imported late: 0.1 s that plans without a file do not need.

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_file(path, text)


def is_run_directory(path: str | Path) -> bool:
    """Whether a path is the directory of a training run: it has a config.json, and metrics or checkpoints."""
    path = Path(path)
    is_begun = (path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir()
    return is_begun and (path / "config.json").is_file()


def has_fields(data: Any) -> TypeGuard[dict[str, Any]]:
    """Whether plain data is a mapping, not a list, text or number."""
    return isinstance(data, dict)


def read_data(path: Path) -> Any:
    """Return the plain data in a JSON or YAML file.

    Raises:
        MeshwrightError: the file cannot be read, or is neither YAML nor JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read {path}: {error}") from None
    if text.startswith("{") or path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MeshwrightError(f"{path} is not JSON: {error}") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # An invalid date raises ValueError.
        raise MeshwrightError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
