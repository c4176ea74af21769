"""Serving in closed form: the cache of keys and values, the time of a decode step and a prefill, what fits.

After the scaling book (jax-ml.github.io/scaling-book), inference and applied-inference chapters: every device at its
full rate and all weights split over all devices, so that times are lower bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.cost.roofline import op_seconds
from meshwright.errors import MeshwrightError
from meshwright.hardware import Chip, System, dtype_bytes, make_system


@dataclass(frozen=True)
class DecodeTime:
    """The time of a decode step: reading the caches, then the weights' products or reading them, what takes longer."""

    cache_seconds: float
    flops_seconds: float
    weights_seconds: float

    @property
    def seconds(self) -> float:
        """The time of one token of every sequence."""
        return self.cache_seconds + max(self.flops_seconds, self.weights_seconds)


def kv_cache_bytes(*, tokens: float, num_layers: int, kv_width: int, dtype: str = "bf16") -> float:
    """The bytes that the keys and values of so many tokens take: 2 · bytes · tokens · L · K · H.

    kv_width: kv heads times their dim, K · H. Scaling book, transformers: KV caching.
    """
    return 2 * dtype_bytes(dtype) * tokens * num_layers * kv_width


def decode_seconds(
    system: System,
    *,
    num_parameters: float,
    batch: float,
    cache_bytes: float,
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
) -> DecodeTime:
    """The time of one decode step on all devices of a system: B KV / (N W) + max(2 B P / (N C), bytes of P / (N W)).

    cache_bytes: of one sequence. num_parameters: those a token is multiplied by; of a mixture of experts a large batch
    reads them all (scaling book, inference: theoretical estimates).
    """
    share = 1 / system.num_devices
    weights = num_parameters * dtype_bytes(weight_dtype)
    products = op_seconds(2 * batch * num_parameters * share, weights * share, system, dtype=compute_dtype)
    caches = batch * cache_bytes * share / system.hbm_bytes_per_second
    return DecodeTime(caches, products.flops_seconds, products.memory_seconds)


def decode_tokens_per_second(time: DecodeTime, *, batch: float) -> float:
    """The tokens a second of all sequences together: one of each a step."""
    return batch / time.seconds


def prefill_seconds(
    system: System, *, num_parameters: float, tokens: float, mfu: float = 1.0, dtype: str = "bf16"
) -> float:
    """The time of a prefill of so many tokens: 2 P T / (N C MFU) (scaling book, applied-inference)."""
    return 2 * num_parameters * tokens / (system.num_devices * system.peak(dtype) * mfu)


def free_bytes(system: System, *, weight_bytes: float) -> float:
    """The memory that weights leave to caches, over all devices, of the memory as sold; negative where they do not fit.

    A bound on the back of an envelope, as in the book; what a program can really have is `System.usable_bytes`.
    """
    return system.num_devices * system.hbm_bytes - weight_bytes


def largest_batch(system: System, *, weight_bytes: float, cache_bytes: float) -> int:
    """The sequences whose caches, of `cache_bytes` each, fit beside the weights; 0 where there is no room."""
    return max(0, math.floor(free_bytes(system, weight_bytes=weight_bytes) / cache_bytes))


def smallest_system(chip: Chip, nbytes: float) -> System:
    """The smallest slice, or number of GPUs, whose memory as sold holds so many bytes.

    Raises where the largest slice does not.
    """
    fewest = max(1, math.ceil(nbytes / chip.hbm_bytes))
    most = math.prod(chip.torus.max_slice) if chip.torus else 2 * fewest
    for count in range(fewest, most + 1):
        try:
            return make_system(chip, (count,))
        except MeshwrightError:  # no slice has as many chips
            continue
    raise MeshwrightError(f"no {chip.name} slice holds {nbytes:.3g} bytes; the largest has {most * chip.hbm_bytes:.3g}")


def prefill_servers(*, prefill_seconds: float, step_seconds: float, batch: float, decode_tokens: float) -> float:
    """The prefill servers that keep one decode server busy: t_prefill B / (t_step decode_tokens).

    Each sequence is prefilled alone, and of `batch` sequences one ends every decode_tokens / batch steps (scaling book,
    applied-inference: disaggregated serving).
    """
    return prefill_seconds * batch / (step_seconds * decode_tokens)


def evicted_tokens(*, batch: float, prefill_tokens: float, decode_tokens: float) -> float:
    """The tokens whose keys and values leave the cache each decode step: B (P + G) / G.

    batch / decode_tokens sequences end each step (scaling book, applied-inference, prefill).
    """
    return batch * (prefill_tokens + decode_tokens) / decode_tokens
