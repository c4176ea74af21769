"""What a run says of its data."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text of a run comes from.

    sources: text files, or folders of them; by default the sources of Python's standard library.
    """

    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
