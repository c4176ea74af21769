"""Data settings of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import Rule
from meshwright.execution.data.sources import FileSource, StoreSource, find_source, parse_sources
from meshwright.execution.data.template import parse_templates
from meshwright.support.field_types import check_fields

RowKind = Literal["windows", "packed", "padded"]
"""Contents of a row: a window of a text, packed documents, or one document with padding."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Sources of a run's tokens, and how they become rows.

    Args:
        sources: files, folders or token stores, all or none of them with a weight, such as `wiki.jsonl=0.7`; by default
            Python's standard library.
        fields: record templates (`execution.data.template`): PATH=TEMPLATE for one source, such as
            `qa.jsonl=[question],answer`, or TEMPLATE for all other sources; by default chosen by a source's first
            record.
        rows: kind of rows (`RowKind`); None for windows if all sources are text, else packed documents.
        held_out: share of the documents or windows left out of training for evaluation.
        bad_data: how to treat unusable records.
        folder: folder in which the run started, to which relative paths refer. Runs with different folders count as
            equal. None in older runs.
    """

    sources: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    rows: RowKind | None = None
    held_out: float = 0.0
    bad_data: Rule = "error"
    folder: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        parse_sources(self.sources)
        parse_templates(self.fields)
        if not 0 <= self.held_out < 1:
            raise MeshwrightError(f"held_out is {self.held_out}; it is a share from 0 to below 1, as 0.01")

    def template(self, path: str) -> str | None:
        """Return the record template of a source; None if the source's first record determines it."""
        templates = parse_templates(self.fields)
        return templates.get(path, templates.get(""))

    def find(self, name: str) -> FileSource | StoreSource:
        """Return the source that the config calls `name`, with its files.

        Raises:
            MeshwrightError: as in `find_path` and `find_source`.
        """
        path = self.find_path(name)
        return find_source(name) if path == name else replace(find_source(path), name=name)

    def find_path(self, name: str) -> str:
        """Return where a path of the config is now, relative to the current folder or absolute.

        A relative path is looked up in the folder where the run started, then in the current folder, because run and
        data may have been moved together.

        Raises:
            MeshwrightError: the path is in neither folder.
        """
        if self.folder is None or Path(name).is_absolute() or self.folder == os.getcwd():
            return name
        there = str(Path(self.folder) / name)
        if is_there(there):
            return there
        if is_there(name):
            return name
        raise MeshwrightError(
            f"there is no {name!r} in {self.folder}, where the run began, nor in {os.getcwd()}: config.json has it by"
            " its path from there; put it back in either, or continue with --data PATH --change"
        )

    def relative(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return paths (each may have a weight), relative to `folder` if they were relative to the current folder."""
        if self.folder is None or self.folder == os.getcwd():
            return tuple(names)
        return tuple(self._relative(name) for name in names)

    def _relative(self, name: str) -> str:
        path = os.path.relpath(name, self.folder)
        return name if Path(name).is_absolute() else os.path.abspath(name) if path.startswith("..") else path


def is_there(path: str) -> bool:
    """Whether a path exists, or a glob pattern matches one."""
    return os.path.lexists(path) or bool(glob(path, recursive=True))
