"""Fraction of peak that a fused attention kernel reaches, by kernel, sequence length and head size.

H100: published measurements. Other GPUs: the same curves, scaled to the kernel's best published rate on that GPU. TPUs:
the compiler's cycle counts for the kernel's instructions (`benchmarks/tpu_attention.py`). Attention is causal: half of
the scores count as flops.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.data_files import gpu_attention, tpu_attention_shares
from meshwright.planning.cost.rates.efficiency import gpu_figures

SIMULATED_SHARE = 0.6
"""Fraction of peak on simulated devices; an assumption, like their other figures."""

TpuKernel = Literal["fwd", "dkv", "dq"]

TPU_PRODUCTS: dict[TpuKernel, int] = {"fwd": 2, "dkv": 4, "dq": 3}
"""The number of matmuls in each attention kernel of `jax.experimental.pallas`, each as large as queries times keys.

`fwd` is the forward kernel, `dkv` computes the gradients of keys and values, `dq` those of queries. Splash and flash
attention have the same numbers: github.com/jax-ml/jax, jax/experimental/pallas/ops/tpu (0.10.2).
"""

LANES = 128
"""Width of a TPU's registers; the blocks of its kernels are multiples of this."""

SPLASH_LENGTH = 1 << 16
"""The longest sequence, in tokens, for which splash attention is used.

Splash attention processes its whole mask during tracing. At this length that takes 16 s of one core, and the time grows
with the square of the length (JAX 0.10.2).
"""

LONG = 16384
"""The sequence length, in tokens, from which the kernels' rates no longer grow."""

BACKWARD_FLOPS = 2.5
"""Backward flops of a fused kernel, divided by its forward flops: five matmuls to two (arXiv:2307.08691, section 4.1).
"""


@dataclass(frozen=True)
class AttentionTime:
    """The seconds of attention, forward and backward."""

    forward: float
    backward: float


def fused_attention_time(flops: float, seq_len: int, head_dim: float, kernel: str, system: System) -> AttentionTime:
    """Return the seconds of causal attention in bf16 by `flash` (FlashAttention-2) or `cudnn`.

    flops: the flops of the forward pass, counting unmasked scores only.
    """
    forward, backward = _shares(system, kernel, seq_len, head_dim)
    ideal = flops / system.peak("bf16")
    return AttentionTime(ideal / forward, BACKWARD_FLOPS * ideal / backward)


def tpu_kernel(length: int) -> Literal["splash", "flash", "blockwise"]:
    """Return the implementation of attention that TPUs use for whole sequences of `length` tokens.

    `splash` is JAX's kernel, `flash` is meshwright's kernel, `blockwise` uses JAX operations and no kernel.
    """
    if length % LANES:
        return "blockwise"
    return "splash" if length <= SPLASH_LENGTH else "flash"


def tpu_chunk_kernel(length: int) -> Literal["flash", "blockwise"]:
    """Return the implementation of attention that TPUs use for chunks of `length` tokens: see `tpu_kernel`."""
    return "blockwise" if length % LANES else "flash"


def tpu_block(head_dim: float) -> int:
    """Return the number of queries, or of keys, in a block of a TPU's kernel.

    Larger blocks have less overhead and compute more masked scores. For wide heads, blocks of 1024 do not fit on the
    chip (`execution/runtime/attention/kernels.py`).
    """
    return 1024 if head_dim <= 128 else 512


def tpu_kernel_share(system: System, kernel: TpuKernel, head_dim: float) -> float:
    """Return the fraction of bf16 peak that a TPU's kernel reaches on long sequences, counting masked scores too.

    Heads narrower than a register (128) take as long as heads of 128. Chips for which no kernels were compiled use the
    fractions of v5p.
    """
    chips = tpu_attention_shares()
    shares = chips.get(system.chip.name, chips["v5p"])
    return shares["128" if head_dim <= 128 else "256"][kernel] * min(1.0, head_dim / 128)


def attention_share(system: System) -> float:
    """Return the fraction of bf16 peak that FlashAttention-2 reaches in a long forward pass with heads of size 128."""
    return _shares(system, "flash", LONG, 128)[0]


@lru_cache(maxsize=1 << 10)
def _shares(system: System, kernel: str, seq_len: int, head_dim: float) -> tuple[float, float]:
    """Return the fractions of bf16 peak that attention reaches: (forward, backward).

    On GPUs they are at most the fraction that matmuls reach under the power limit.
    """
    if system.chip.kind == "tpu":
        # Kernels compute whole blocks: of n blocks of keys, causal attention computes (n + 1) / 2 on average. Backward
        # is two kernels with seven matmuls. Two of these repeat others, so five are counted as flops.
        rows = max(1, seq_len // tpu_block(head_dim))
        seen = rows / (rows + 1)
        seconds = {kernel: count / tpu_kernel_share(system, kernel, head_dim) for kernel, count in TPU_PRODUCTS.items()}
        forward = TPU_PRODUCTS["fwd"] / seconds["fwd"]
        backward = BACKWARD_FLOPS * TPU_PRODUCTS["fwd"] / (seconds["dkv"] + seconds["dq"])
        return seen * forward, seen * backward
    if system.chip.kind != "gpu":
        return SIMULATED_SHARE, SIMULATED_SHARE
    data, name, scale = gpu_attention(), system.chip.name, (1.0, 1.0)
    best = next((data["best"][start] for start in ("a100", "b") if name.removeprefix("g").startswith(start)), None)
    if best:
        kernel = best["kernel"]
        most = data["curves"][kernel]["128"]
        scale = best["forward"] / most["forward"][-2], best["backward"] / most["backward"][-2]
    curves = data["curves"][kernel]["64" if head_dim < 96 else "128"]
    causal, full, back = (
        _interpolated(seq_len, data["seq_lens"], curves[key]) for key in ("causal_forward", "forward", "backward")
    )
    # A causal backward pass is not measured; the mask is assumed to slow it as much as the forward pass.
    rates = causal * scale[0], back * causal / full * scale[1]
    figures = gpu_figures(name)
    most = figures.peak_share * figures.sustained_share * system.chip.power_share
    forward, backward = (min(1e12 * rate / system.peak("bf16"), most) for rate in rates)
    return forward, backward


def _interpolated(seq_len: int, seq_lens: list[int], rates: list[float]) -> float:
    """Return the rate at a sequence length: linear in log(length) between measured lengths, constant beyond them."""
    if seq_len <= seq_lens[0]:
        return rates[0]
    if seq_len >= seq_lens[-1]:
        return rates[-1]
    high = bisect_right(seq_lens, seq_len)
    part = math.log(seq_len / seq_lens[high - 1]) / math.log(seq_lens[high] / seq_lens[high - 1])
    return rates[high - 1] + part * (rates[high] - rates[high - 1])
