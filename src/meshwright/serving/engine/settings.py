"""How an engine is laid out: its rows, its pages, the shapes of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.description.step.serve import pages_read
from meshwright.description.step.serving import CacheSplit
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields

Int8 = Literal["int8"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine; what is None follows from the model, the mesh and memory.

    Args:
        rows: the most sequences that are generated at once, over all devices.
        context: the most tokens of a sequence, its prompt included.
        page_size: tokens of a page.
        cache_tokens: the tokens that the pages of layers without a window have room for, over all devices.
        cache_split: what of the cache is split beside its heads.
        kv_dtype: of keys and values: int8 with a scale of each token and head; None for the dtype of products.
        weight_dtype: of the products of layers: int8 with a scale of each column; None for as they were loaded.
        chunk_tokens: the most tokens of prompts that are read between two steps of decoding.
        prefix_cache: whether pages of sequences that ended are kept for prompts with the same prefix.
        num_drafts: draft tokens of each step, from n-grams of the sequence or a draft model; 0 for none.
        max_queue: requests that wait at most; others are refused (try again later).
    """

    rows: int | None = None
    context: int | None = None
    page_size: int = 16
    cache_tokens: int | None = None
    cache_split: CacheSplit | None = None
    kv_dtype: Int8 | None = None
    weight_dtype: Int8 | None = None
    chunk_tokens: int = 1024
    prefix_cache: bool = True
    num_drafts: int = 0
    max_queue: int = 1024

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (
            ("rows", 1), ("context", 2), ("page_size", 1), ("cache_tokens", 1), ("chunk_tokens", 1), ("num_drafts", 0),
            ("max_queue", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise MeshwrightError(f"{name} is {value}; it is {least} or more")
        if self.num_drafts > 16:
            raise MeshwrightError(f"num_drafts is {self.num_drafts}; it is at most 16, as most drafts are wrong soon")


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """What an engine has, all said.

    Args:
        shards: groups of devices that have rows and pages of their own. rows: of each. pages: of each, for each window.
        windows: the windows of the model's layers, in the order of its caches.
        widths: the entries of page tables that programs are compiled for, ascending; the last has room for `context`.
        decoded: the rows of each shard that decoding is compiled for, ascending; the last has all.
        chunks: the shapes that prompts are read in: rows of each shard, and tokens of each. scored: those of them that
            prompts are scored in.
        chunk_overhead: the tokens of a shard that take as long as reading the weights once.
        switch: the length from which all frequencies of a text are others (LongRoPE); None where there is none.
        stretched_from: the length of prompts from which frequencies depend on it (dynamic scaling); None likewise.
    """

    context: int
    page_size: int
    shards: int
    rows: int
    windows: tuple[int | None, ...]
    pages: tuple[int, ...]
    widths: tuple[int, ...]
    decoded: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    scored: tuple[tuple[int, int], ...] = ()
    chunk_overhead: float = 0.0
    num_drafts: int = 0
    prefix_cache: bool = True
    switch: int | None = None
    stretched_from: int | None = None

    def entries(self, width: int, length: int) -> tuple[int, ...]:
        """The table entries of each window in a step of `length` tokens a row, where texts have `width` pages."""
        return pages_read(self.windows, self.page_size, width, length)
