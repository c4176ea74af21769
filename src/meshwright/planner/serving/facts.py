"""What there is to say of a serving plan: data for `planner.serving.sentences`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True)
class Shortage:
    """Nothing fits: what weights and cache take of a device at a batch, and the bytes that are missing."""

    weights_bytes: int
    cache_bytes: int
    batch: int
    missing_bytes: float


@dataclass(frozen=True)
class Late:
    """Nothing is in time: by how much the shortest step exceeds the latency asked for."""

    late_seconds: float
    latency_seconds: float


@dataclass(frozen=True)
class LongestTerm:
    """The term of a step that takes longest."""

    term: str
    seconds: float
    share: float


@dataclass(frozen=True)
class ServingThresholds:
    """The batches, over all devices, at which a decode step changes its kind.

    compute_bound: from here products with weights are bound by arithmetic. equal_reads: from here a device reads more
    cache than weights.
    """

    compute_bound: float
    equal_reads: float


@dataclass(frozen=True)
class BatchLimit:
    """What keeps the batch from growing by one sequence in each group, and what the larger batch would take.

    most: the largest batch that fits in memory.
    """

    limit: Literal["memory", "latency", "none"]
    batch: int
    peak_bytes: int
    usable_bytes: float
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    most: int = 0


@dataclass(frozen=True)
class SequenceCache:
    """What a sequence holds at its end: its tokens in pages, the share of these that is empty, and the bytes.

    context: all its tokens; a window keeps fewer.
    """

    tokens: int
    context: int
    pages: int
    page_size: int
    empty_share: float
    bytes: float


@dataclass(frozen=True)
class PrefillSystems:
    """The systems of the same size that prefill for each one that decodes, and how: a prompt at a time on a layout."""

    systems: float
    system: str
    prompt_seconds: float
    layout: str


class ServingGapKind(StrEnum):
    """Why a layout is not the best."""

    BEST = "best"
    MEMORY = "does not fit"
    LATE = "late"
    EQUAL = "as fast, with less memory left"
    TERM = "term"


@dataclass(frozen=True)
class ServingGap:
    """The largest difference of a layout from the best one; seconds are of a token where throughput decides."""

    kind: ServingGapKind
    term: str = ""
    seconds: float = 0.0
    per_token: bool = False
    batch: int = 0
    missing_bytes: float = 0.0


ServingFact = Shortage | Late | LongestTerm | ServingThresholds | BatchLimit | SequenceCache | PrefillSystems
