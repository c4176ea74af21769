"""Plans as files: YAML, or JSON where the name ends so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
