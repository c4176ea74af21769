"""Settings and layout of an engine: its rows, its pages, and the shapes of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.description.families.adapters import with_adapter_slots
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serve import pages_read
from meshwright.description.step.serving import CacheDtype, CacheSplit
from meshwright.description.step.weight_formats import WeightDtype
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine; None means derived from the model, the mesh and memory.

    Args:
        rows: maximum number of sequences generated at once, over all devices.
        context: maximum number of tokens of a sequence, including its prompt.
        page_size: tokens of a page.
        cache_tokens: number of tokens for which layers without an attention window have pages, over all devices.
        cache_split: how the cache is split over devices in addition to heads.
        kv_dtype: dtype of keys and values: int8 with a scale for each token and head, fp8 (e4m3) without scales, or
            None for the compute dtype.
        weight_dtype: format of the layers' matmul weights (`step.weight_formats`), or None for the loaded dtype.
        chunk_tokens: maximum number of prompt tokens processed between two decode steps.
        prefix_cache: whether pages of sequences that ended are kept for prompts with the same prefix.
        adapter_slots: maximum number of low-rank adapters that are loaded at once.
        adapter_rank: maximum rank of an adapter.
        adapter_ends: which of the embedding and the output head adapters may change besides the layers' matmuls, by
            their names in `step.lora`.
        num_drafts: draft tokens per row and decode step, from n-grams of the sequence or a draft model; 0 for none.
        max_queue: maximum number of waiting sequences; further requests are refused and can be retried.
    """

    rows: int | None = None
    context: int | None = None
    page_size: int = 16
    cache_tokens: int | None = None
    cache_split: CacheSplit | None = None
    kv_dtype: CacheDtype | None = None
    weight_dtype: WeightDtype | None = None
    chunk_tokens: int = 1024
    prefix_cache: bool = True
    adapter_slots: int = 0
    adapter_rank: int = 16
    adapter_ends: tuple[str, ...] = ()
    num_drafts: int = 0
    max_queue: int = 1024

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (
            ("rows", 1), ("context", 2), ("page_size", 1), ("cache_tokens", 1), ("chunk_tokens", 1), ("num_drafts", 0),
            ("max_queue", 1), ("adapter_slots", 0), ("adapter_rank", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                named = "batch" if name == "rows" else name  # The option's name, also in serving plans.
                raise MeshwrightError(f"{named} is {value}; it is {least} or more")
        if self.num_drafts > 16:
            raise MeshwrightError(f"num_drafts is {self.num_drafts}; it is at most 16, as most drafts are wrong soon")

    def with_slots(self, model: ModelConfig) -> ModelConfig:
        """Return the model with the adapter slots of the engine."""
        ends = self.adapter_ends
        return with_adapter_slots(model, slots=self.adapter_slots, rank=self.adapter_rank, ends=ends)


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The layout of an engine, with all values determined.

    Args:
        context: maximum number of tokens of a sequence.
        page_size: tokens of a page.
        shards: groups of devices with separate rows and pages.
        rows: rows of each shard.
        windows: the different attention windows of the model's layers, in tokens; None for no window. Layers with the
            same window share page numbers.
        pages: pages of each shard, for each window.
        widths: page-table entries for which programs are compiled, ascending; the last one fits `context`.
        decoded: rows per shard for which decode programs are compiled, ascending; the last is all rows.
        chunks: shapes of chunks of prompts: rows of each shard, and tokens of each row.
        chunk_overhead: number of a shard's tokens whose computation takes as long as reading the weights once.
        num_drafts: draft tokens per row and decode step.
        prefix_cache: whether pages of sequences that ended are kept for prompts with the same prefix.
        switch: number of tokens of a sequence from which all its rotary frequencies change (LongRoPE); None for other
            models.
        stretched_from: length from which the rotary frequencies depend on the prompt's length (dynamic scaling); None
            for other models.
        has_state: whether each row has a recurrent state of linear attention, which cannot go back to an earlier token.
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
    chunk_overhead: float = 0.0
    num_drafts: int = 0
    prefix_cache: bool = True
    switch: int | None = None
    stretched_from: int | None = None
    has_state: bool = False

    def entries(self, width: int, length: int) -> tuple[int, ...]:
        """Return, for each window, the page-table entries of a row in a step.

        Args:
            width: pages of the longest sequence in the step.
            length: tokens of each row.
        """
        return pages_read(self.windows, self.page_size, width, length)
