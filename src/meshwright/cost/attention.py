"""What a fused attention kernel reaches of the peak: measured rates by kernel, sequence length and size of heads.

On an H100 as published; on other GPUs the same curves, scaled to what the kernel reaches there at best. Causal: only
half of the scores count as flops, and only that half is computed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost.efficiency import gpu_figures, read_data
from meshwright.hardware import System

SHARE_ELSEWHERE = 0.6
"""Of the peak of arithmetic, on a TPU: assumed, between what the kernels reach on an A100 and an H100."""

LONG = 16384
"""A sequence from which the rates no longer grow."""

BACKWARD_FLOPS = 2.5
"""The products of a fused kernel backward, five, for two forward (arXiv:2307.08691, section 4.1)."""


@dataclass(frozen=True)
class AttentionTime:
    """The seconds of attention, forward and backward."""

    forward: float
    backward: float


def fused_attention_time(flops: float, seq_len: int, head_dim: float, kernel: str, system: System) -> AttentionTime:
    """The time of causal attention of so many flops forward, by `flash` (FlashAttention-2) or `cudnn` in bf16."""
    forward, backward = _shares(system, kernel, seq_len, head_dim)
    ideal = flops / system.peak("bf16")
    return AttentionTime(ideal / forward, BACKWARD_FLOPS * ideal / backward)


def attention_share(system: System) -> float:
    """The share of the bf16 peak that FlashAttention-2 has forward on long sequences, with heads of 128."""
    return _shares(system, "flash", LONG, 128)[0]


@lru_cache(maxsize=1 << 10)
def _shares(system: System, kernel: str, seq_len: int, head_dim: float) -> tuple[float, float]:
    """The shares of the bf16 peak, forward and backward; never above what products reach under the power limit."""
    if system.chip.kind != "gpu":
        return SHARE_ELSEWHERE, SHARE_ELSEWHERE
    data, name, scale = read_data("attention"), system.chip.name, (1.0, 1.0)
    best = next((data["best"][start] for start in ("a100", "b") if name.removeprefix("g").startswith(start)), None)
    if best:
        kernel = best["kernel"]
        most = data["curves"][kernel]["128"]
        scale = best["forward"] / most["forward"][-2], best["backward"] / most["backward"][-2]
    curves = data["curves"][kernel]["64" if head_dim < 96 else "128"]
    causal, full, back = (
        _at(seq_len, data["seq_lens"], curves[key]) for key in ("causal_forward", "forward", "backward")
    )
    # A causal backward is measured nowhere here; the mask is taken to cost it as much as it costs forward.
    rates = causal * scale[0], back * causal / full * scale[1]
    figures = gpu_figures(name)
    most = figures.peak_share * figures.sustained_share * system.chip.power_share
    forward, backward = (min(1e12 * rate / system.peak("bf16"), most) for rate in rates)
    return forward, backward


def _at(seq_len: int, seq_lens: list[int], rates: list[float]) -> float:
    """The rate at a length: linear in its logarithm between those measured, level beyond them."""
    if seq_len <= seq_lens[0]:
        return rates[0]
    if seq_len >= seq_lens[-1]:
        return rates[-1]
    high = bisect_right(seq_lens, seq_len)
    part = math.log(seq_len / seq_lens[high - 1]) / math.log(seq_lens[high] / seq_lens[high - 1])
    return rates[high - 1] + part * (rates[high] - rates[high - 1])
