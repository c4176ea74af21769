"""The option that writes a page."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import MeshwrightError


def check_page(path: Path | None) -> None:
    """Raise where a page cannot be written to a path, before anything is computed for it; no path is none wanted."""
    if path is not None and not path.parent.is_dir():
        raise MeshwrightError(f"--html {path}: there is no directory {path.parent}")
