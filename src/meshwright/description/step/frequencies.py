"""Rotary frequencies as data: theta, and the scaling to sequences longer than in pre-training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Linear interpolation: positions are divided by a factor (arXiv:2306.15595), as in Gemma 3's global layers."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling (arXiv:2407.21783): only the low frequencies are divided by the factor.

    A frequency is low if it rotates less than `low_freq_factor` times within the original length, and high (unscaled)
    if it rotates more than `high_freq_factor` times. Between the two the divisor changes smoothly.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class DynamicRopeScaling:
    """Dynamic NTK scaling (arXiv:2309.00071, B.2): theta grows with sequences longer than the original length."""

    factor: float
    original_max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (arXiv:2309.00071): fast-rotating dims keep their frequency, slow ones are divided by the factor.

    Attributes:
        beta_fast: a dim that rotates more often than this within the original length keeps its frequency.
        beta_slow: the frequency of a dim that rotates less often than this is divided by the whole factor; between the
            two, the divisor changes linearly (the ramp).
        truncate: whether the ramp starts and ends at whole pairs of dims.
        attention_factor: factor of cosines and sines; None: the paper's, or from `mscale` and `mscale_all_dim` if both
            are set.
        query_beta: the query at position p is multiplied by 1 + query_beta * ln(1 + floor(p / original length)), as in
            Ministral 3 and Llama 4; 0: no scaling.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    query_beta: float = 0.0

    def magnitude(self, scale: float = 1.0) -> float:
        """Return 0.1 * scale * ln(factor) + 1 (equation 22 of the paper).

        DeepSeek also multiplies attention scores by the square of such a factor.
        """
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def ramp(self, theta: float, size: int) -> tuple[float, float]:
        """Return where the ramp starts and ends (equation 17), as indices into the `size` / 2 pairs of dims."""
        low, high = (
            size * math.log(self.original_max_seq_len / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, size - 1)
        return low, high if high != low else low + 0.001


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency has a divisor for short sequences and one for long sequences.

    Attributes:
        short_factor: divisor of each pair of rotated dims in sequences up to the original length.
        long_factor: divisor of each pair in longer sequences.
        factor: the longest sequence divided by the original length.
        attention_factor: factor of cosines and sines at any length; None: sqrt(1 + ln(factor) / ln(original length)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_seq_len: int
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProportionalRopeScaling:
    """Only the first `share` of the pairs of dims is rotated, by frequencies divided by the factor (Gemma 4)."""

    share: float
    factor: float = 1.0


RopeScaling = (
    LinearRopeScaling
    | Llama3RopeScaling
    | DynamicRopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
)
"""How rotary frequencies are scaled."""


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """The query at position p is multiplied by 1 + beta * ln(1 + floor((p + offset) / length)) (arXiv:2501.19399)."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Frequencies:
    """Rotary frequencies: theta, and their scaling if any."""

    theta: float
    scaling: RopeScaling | None = None
    is_identity: bool = False  # Whether all angles are 0: a layer without positions among layers that have them.
    of_queries: QueryScaling | None = None  # Scaling of queries, without YaRN's `query_beta` (Llama 4).

    @property
    def query_scaling(self) -> QueryScaling | None:
        """How queries are multiplied by a number that depends on their position; None if they are not."""
        scaling = self.scaling
        if isinstance(scaling, YarnRopeScaling) and scaling.query_beta > 0:
            return QueryScaling(beta=scaling.query_beta, length=scaling.original_max_seq_len)
        return self.of_queries

    @property
    def of_keys(self) -> Frequencies:
        """The frequencies of keys: these frequencies without the scaling of queries."""
        scaling = self.scaling
        scaling = replace(scaling, query_beta=0.0) if isinstance(scaling, YarnRopeScaling) else scaling
        return replace(self, scaling=scaling, of_queries=None)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a position depend on the length of the sequence."""
        return isinstance(self.scaling, DynamicRopeScaling | LongRopeScaling)

    @property
    def magnitude(self) -> float:
        """Factor by which cosines and sines are multiplied."""
        scaling = self.scaling
        if not isinstance(scaling, YarnRopeScaling | LongRopeScaling):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if isinstance(scaling, LongRopeScaling):
            factor, length = max(1.0, scaling.factor), scaling.original_max_seq_len
            return math.sqrt(1 + math.log(factor) / math.log(length))
        if scaling.mscale is None or scaling.mscale_all_dim is None:
            return scaling.magnitude()
        return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)
