"""What a run says of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.data import Rule, parse_sources, parse_templates
from meshwright.errors import MeshwrightError
from meshwright.field_types import check_fields

RowKind = Literal["windows", "packed", "padded"]
"""What a row of a batch is: a window of a text, documents that are packed, or one document and padding."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens of a run come from, and how they are laid into rows.

    sources: files, folders or stores of tokens, each with a weight as `wiki.jsonl=0.7` or none with one; by default the
    sources of Python's standard library. fields: templates of records (`data.template`), of one source as
    `qa.jsonl=[question],answer`, or of all others as `text`; by default the first record of a source says it. rows: see
    `RowKind`; None for windows of text and packed documents. held_out: the share that is left out of training, for
    evaluation. bad_data: what is done with records that cannot be used.
    """

    sources: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    rows: RowKind | None = None
    held_out: float = 0.0
    bad_data: Rule = "error"

    def __post_init__(self) -> None:
        check_fields(self)
        parse_sources(self.sources)
        parse_templates(self.fields)
        if not 0 <= self.held_out < 1:
            raise MeshwrightError(f"held_out is {self.held_out}; it is a share from 0 to below 1, as 0.01")

    def template(self, path: str) -> str | None:
        """The template of the records of a source; None where its first record says it."""
        templates = parse_templates(self.fields)
        return templates.get(path, templates.get(""))
