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

TPU_PRODUCTS: dict[TpuKernel, tuple[int, int]] = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
"""The number of matmuls in each TPU attention kernel: over the head dim of queries, and over that of values.

`fwd` is the forward kernel, `dkv` computes the gradients of keys and values, `dq` those of queries. Splash and flash
attention have the same numbers: github.com/jax-ml/jax, jax/experimental/pallas/ops/tpu (0.10.2).
"""

COMPILED_DIMS = ((128, 128), (192, 128), (256, 256))
"""Head dims of queries and of values for which TPU kernels were compiled, in ascending order.

192 and 128 are those of DeepSeek's latent attention.
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


def fused_attention_time(
    flops: float, seq_len: int, qk_dim: int, value_dim: int, kernel: str, system: System
) -> AttentionTime:
    """Return the seconds of causal attention in bf16 by `flash` (FlashAttention-2) or `cudnn`.

    flops: the flops of the forward pass, counting unmasked scores only. qk_dim, value_dim: head dims.
    """
    forward, backward = _shares(system, kernel, seq_len, qk_dim, value_dim)
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


def tpu_block(qk_dim: int) -> int:
    """Return the number of queries, or of keys, in a block of a TPU's kernel, by the head dim of queries.

    Larger blocks have less overhead and compute more masked scores. For wide heads, blocks of 1024 do not fit on the
    chip (`execution/runtime/attention/kernels.py`).
    """
    return 1024 if qk_dim <= LANES else 512


def tpu_kernel_width(kernel: TpuKernel, qk_dim: int, value_dim: int) -> int:
    """Return the head dims of all matmuls of a TPU's kernel, added: its flops are 2 x scores x this."""
    of_queries, of_values = TPU_PRODUCTS[kernel]
    return of_queries * qk_dim + of_values * value_dim


def tpu_kernel_share(system: System, kernel: TpuKernel, qk_dim: int, value_dim: int) -> float:
    """Return the fraction of bf16 peak that a TPU's kernel reaches on long sequences, counting masked scores too.

    Heads narrower than those of a compiled kernel take as long as these. Chips for which no kernels were compiled use
    the fractions of v5p.
    """
    chips = tpu_attention_shares()
    shares = chips.get(system.chip.name, chips["v5p"])
    compiled = next((dims for dims in COMPILED_DIMS if qk_dim <= dims[0] and value_dim <= dims[1]), COMPILED_DIMS[-1])
    filled = tpu_kernel_width(kernel, qk_dim, value_dim) / tpu_kernel_width(kernel, *compiled)
    return shares["/".join(map(str, compiled))][kernel] * min(1.0, filled)


def attention_share(system: System) -> float:
    """Return the fraction of bf16 peak that FlashAttention-2 reaches in a long forward pass with heads of size 128."""
    return _shares(system, "flash", LONG, 128, 128)[0]


@lru_cache(maxsize=1 << 10)
def _shares(system: System, kernel: str, seq_len: int, qk_dim: int, value_dim: int) -> tuple[float, float]:
    """Return the fractions of bf16 peak that attention reaches: (forward, backward).

    On GPUs they are at most the fraction that matmuls reach under the power limit.
    """
    if system.chip.kind == "tpu":
        # Kernels compute whole blocks: of n blocks of keys, causal attention computes (n + 1) / 2 on average. Backward
        # is two kernels with seven matmuls. Two of these repeat others, so five are counted as flops.
        rows = max(1, seq_len // tpu_block(qk_dim))
        seen, dims = rows / (rows + 1), (qk_dim, value_dim)
        passes = [tpu_kernel_width(each, *dims) / tpu_kernel_share(system, each, *dims) for each in ("dkv", "dq")]
        backward = BACKWARD_FLOPS * tpu_kernel_width("fwd", *dims) / sum(passes)
        return seen * tpu_kernel_share(system, "fwd", *dims), seen * backward
    if system.chip.kind != "gpu":
        return SIMULATED_SHARE, SIMULATED_SHARE
    data, name, scale = gpu_attention(), system.chip.name, (1.0, 1.0)
    best = next((data["best"][start] for start in ("a100", "b") if name.removeprefix("g").startswith(start)), None)
    if best:
        kernel = best["kernel"]
        most = data["curves"][kernel]["128"]
        scale = best["forward"] / most["forward"][-2], best["backward"] / most["backward"][-2]
    curves = data["curves"][kernel]["64" if (qk_dim + value_dim) / 2 < 96 else "128"]
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
