"""Rules of thumb for a layout, with their numbers: from which batch each strategy is compute bound, and the best split.

After the scaling book (jax-ml.github.io/scaling-book), training and gpus chapters. alpha is `network_intensity`: the
flops that a device does in the time of one byte on the links of one physical axis, both directions together, or on its
share of a level of switches. Thresholds are rules for many devices; what a given mesh takes is `planner.predict`'s.
"""

from __future__ import annotations

import math

from meshwright.errors import MeshwrightError
from meshwright.hardware import System


def critical_tokens_data(alpha: float, *, links: float = 1, degree: float = math.inf) -> float:
    """The tokens a device from which data parallelism, or FSDP, hides its communication: alpha / M · (n - 1) / n.

    links: the physical axes it runs over, or the nodes that each replica's model parallelism spans, which bring as many
    times the bandwidth. degree: few replicas exchange less (scaling book, training and gpus: data parallelism).
    """
    return alpha / links * (1 if math.isinf(degree) else (degree - 1) / degree)


def critical_tensor_degree(alpha: float, *, ffw_dim: float, links: int = 1) -> float:
    """The degree of tensor parallelism below which it is compute bound, whatever the batch: M_Y F / alpha.

    Scaling book, training: tensor parallelism.
    """
    return links * ffw_dim / alpha


def critical_ffw_dim_experts(alpha: float, *, degree: int, num_active: int, node: int = 8) -> float:
    """The width F of an expert from which expert parallelism over nodes of GPUs is compute bound; 0 inside one node.

    alpha (Z - n) / k · min(n k / Z, 1) for Z devices in nodes of n, of which a token goes to k: beyond the own node,
    and to no node twice. alpha: across nodes (scaling book, gpus: expert parallelism).
    """
    if degree <= node:
        return 0.0
    return alpha * (degree - node) / num_active * min(node * num_active / degree, 1)


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
