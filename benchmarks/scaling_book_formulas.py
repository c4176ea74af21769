"""Formulas of the scaling book (jax-ml.github.io/scaling-book) that its worked examples need and no plan does.

Thresholds of layouts and serving in closed form: rules for many devices at their full rate, so that times are lower
bounds. alpha is `cost.roofline.network_intensity`: the flops that a device does in the time of one byte on the links of
one physical axis, both directions together, or on its share of a level of switches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.description.hardware.chip import Chip
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System, make_system
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.roofline import op_seconds


def critical_tokens_data(alpha: float, *, links: float = 1, degree: float = math.inf) -> float:
    """The tokens a device from which data parallelism, or FSDP, hides its communication: alpha / M · (n - 1) / n.

    links: the physical axes it runs over, or the nodes that each replica's model parallelism spans, which bring as many
    times the bandwidth. degree: few replicas exchange less (scaling book, training and gpus: data parallelism).
    """
    return alpha / links * (1 if math.isinf(degree) else (degree - 1) / degree)


def best_fsdp_degree(
    tokens: float, *, num_devices: int, ffw_dim: float, fsdp_links: int = 2, tp_links: int = 1
) -> float:
    """The degree of FSDP that communicates least beside tensor parallelism of the rest: sqrt(B M_X N / (F M_Y)).

    The book's X_opt (training), a real number; `power_of_two` makes a degree of it. tokens: of the global batch.
    """
    return math.sqrt(tokens / ffw_dim * fsdp_links / tp_links * num_devices)


def power_of_two(degree: float, *, at_most: int) -> int:
    """The power of two that is nearest to a degree by ratio, from 1 to `at_most`."""
    if degree <= 0 or at_most < 1:
        raise MeshwrightError(f"degree {degree:g} of at most {at_most} is not positive")
    return 2 ** max(0, min(round(math.log2(degree)), math.floor(math.log2(at_most))))


def training_seconds(
    system: System,
    *,
    num_parameters: float,
    tokens: float,
    mfu: float,
    num_devices: float | None = None,
    dtype: str = "bf16",
) -> float:
    """The time to train on so many tokens: 6 P T / (N C MFU), attention scores left out (scaling book, transformers).

    num_devices: where they are not those of the system; may be a fraction, as a threshold is.
    """
    devices = system.num_devices if num_devices is None else num_devices
    return 6 * num_parameters * tokens / (devices * system.peak(dtype) * mfu)


def utilisation(flops: float, seconds: float, *, peak: float, num_devices: int = 1) -> float:
    """The share of the peak that `flops` in `seconds` are, on devices of `peak` flops a second each."""
    return flops / (seconds * num_devices * peak)


def feedforward_texts(batch: tuple[str, ...], fsdp: tuple[str, ...], tp: tuple[str, ...]) -> tuple[str, str]:
    """The two products of a feedforward block, In[B, D] @ Win[D, F] and then @ Wout[F, D], in the notation.

    batch: the axes that split tokens; fsdp those that split D of the weights, tp F of the weights and D of the stream.
    """
    B, X, Y = (f"_{''.join(axes)}" if axes else "" for axes in (batch, fsdp, tp))
    return (
        f"In[B{B}, D{Y}] @ Win[D{X}, F{Y}] -> H[B{B}, F{Y}]",
        f"H[B{B}, F{Y}] @ Wout[F{Y}, D{X}] -> Out[B{B}, D{Y}]",
    )


def critical_tokens_moe(tokens: float, *, num_experts: int, num_active: int) -> float:
    """The tokens from which a mixture of experts is compute bound, of those for a dense layer: times E / k.

    All E experts' weights are read or communicated and k of them work on a token (scaling book, gpus, data
    parallelism: MoE models).
    """
    if not 0 < num_active <= num_experts:
        raise MeshwrightError(f"{num_active} active of {num_experts} experts; the active are from 1 to all of them")
    return tokens * num_experts / num_active


def critical_tokens_fsdp_tp(
    alpha: float, *, num_devices: int, ffw_dim: int, fsdp_links: int = 2, tp_links: int = 1
) -> float:
    """The global batch in tokens from which FSDP mixed with tensor parallelism is compute bound at the best split.

    N alpha^2 / (M_X M_Y F): scaling book, training, mixed FSDP and tensor parallelism. alpha: `network_intensity` of
    one physical axis; the links are the physical axes that fsdp and tp each span.
    """
    return num_devices * alpha**2 / (fsdp_links * tp_links * ffw_dim)


def pipeline_transfer_seconds(hop_seconds: float, *, num_microbatches: int, num_stages: int) -> float:
    """The time that activations travel between the stages of a pipeline before the last microbatch is through.

    hop_seconds: one microbatch from a stage to the next (a permute). m + p - 2 of them follow each other: scaling book,
    gpus, pipeline parallelism.
    """
    return hop_seconds * (num_microbatches + num_stages - 2)


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


def evicted_tokens(*, batch: float, prefill_tokens: float, decode_tokens: float) -> float:
    """The tokens whose keys and values leave the cache each decode step: B (P + G) / G.

    batch / decode_tokens sequences end each step (scaling book, applied-inference, prefill).
    """
    return batch * (prefill_tokens + decode_tokens) / decode_tokens
